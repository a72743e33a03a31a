// A team of threads that carries out one step after another. Within a step its members meet at barriers and share out
// tasks by counting; between steps they spin briefly and then sleep, so that an idle server costs nothing.
#pragma once

#include <atomic>
#include <climits>
#include <functional>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "simd.h"

class Team {
public:
  // Raises std::system_error if there can be no more threads.
  explicit Team(int size) : size_(size), shares_(size) {
    try {
      for (int i = 1; i < size; i++)
        members_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Team() { end(); }

  int size() const { return size_; }

  // From some moment on.
  static double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
  }

  // Have every member, the caller as number 0, call `work(member)`; return when all have.
  void run(const std::function<void(int)> &work) {
    work_ = &work;
    if (size_ > 1)
      wake();
    work(0);
    barrier();
  }

  // The first of `tasks` that are a member's own.
  int begin_of(int member, int tasks) const { return (int)((int64_t)tasks * member / size_); }

  // The next of `tasks`, shared out since the last barrier, that `member` does, or -1. It has a run of them of its own,
  // so that it reads memory in order, and does what is left of the others' when that is done.
  int take(int member, int tasks) {
    for (int i = 0; i < size_; i++) {
      const int owner = (member + i) % size_;
      const int first = begin_of(owner, tasks), last = begin_of(owner + 1, tasks);
      std::atomic<int> &taken = shares_[owner].taken;
      if (taken.load(std::memory_order_relaxed) >= last - first)
        continue;
      const int task = first + taken.fetch_add(1, std::memory_order_relaxed);
      if (task < last)
        return task;
    }
    return -1;
  }

  // Wait for all members. What each has written before is seen by all after; tasks are shared out anew.
  void barrier() {
    unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      for (auto &share : shares_)
        share.taken.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      _mm_pause();
      if (spins > 300)
        sched_yield(); // another process may have the core that the last one needs
    }
  }

private:
  static constexpr double SPIN_SECONDS = 100e-6;

  struct alignas(64) Share {
    std::atomic<int> taken{0};
  };

  void end() {
    stop_ = true;
    wake();
    for (auto &member : members_)
      member.join();
  }

  void wake() {
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, (int *)&generation_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void serve(int member) {
    int seen = 0;
    for (;;) {
      await(seen);
      seen++;
      if (stop_)
        return;
      (*work_)(member);
      barrier();
    }
  }

  // Wait until the generation is no longer `seen`.
  void await(int seen) {
    const double until = seconds() + SPIN_SECONDS;
    for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; spins++) {
      _mm_pause();
      if (spins % 64 == 63 && seconds() > until) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        while (generation_.load(std::memory_order_seq_cst) == seen)
          syscall(SYS_futex, (int *)&generation_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
  }

  int size_;
  std::vector<Share> shares_;
  std::vector<std::thread> members_;
  const std::function<void(int)> *work_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> generation_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};
