// A team of threads that computes one step after another. Within a step its members meet at barriers, and take tasks
// from counters. Where they wait they spin briefly and then sleep, so that an idle server uses no CPU time, and a
// member that waits takes none from one that works. Each begins a step on a CPU without an earlier one, if it can: if
// another process uses a CPU, the system may wake two members on the same one, and let them take turns there for a
// tenth of a second, in which steps take twice as long.
#pragma once

#include <atomic>
#include <climits>
#include <functional>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <condition_variable>
#include <mutex>
#endif

#include "simd.h"

// Returns seconds since a fixed moment, unaffected by changes of the clock.
inline double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A number that threads wait for to grow. They spin for a moment and then sleep, since the threads that they wait for
// may need the CPU.
class Awaited {
public:
  int value() const { return number_.load(std::memory_order_relaxed); }

  // Adds one. Threads that waited see all that was written before.
  void grow() {
    number_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0)
      wake_all();
  }

  // Waits until the number differs from `seen`.
  void wait(int seen) {
    double until = 0;
    for (int spins = 1; number_.load(std::memory_order_acquire) == seen; spins++) {
      pause_spinning();
      if (spins == 64) {
        until = seconds() + SPIN_SECONDS;
      } else if (spins % 64 == 0 && seconds() > until) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        while (number_.load(std::memory_order_seq_cst) == seen)
          sleep(seen);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
  }

private:
  static constexpr double SPIN_SECONDS = 100e-6;

  // Returns when the number may differ from `seen`.
  void sleep(int seen) {
#if defined(__linux__)
    syscall(SYS_futex, (int *)&number_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return number_.load(std::memory_order_seq_cst) != seen; });
#endif
  }

  void wake_all() {
#if defined(__linux__)
    syscall(SYS_futex, (int *)&number_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    {
      std::lock_guard<std::mutex> lock(mutex_);
    } // none is between its check and its sleep
    changed_.notify_all();
#endif
  }

  alignas(64) std::atomic<int> number_{0};
  alignas(64) std::atomic<int> sleeping_{0};
#if !defined(__linux__)
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

class Team {
public:
  // Throws std::system_error if a thread cannot be started.
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

  // Keeps a member, other than the caller's thread, on these cores. Returns whether the system can do that.
  bool pin(int member, const int32_t *cores, int count) {
#if defined(__linux__)
    cpu_set_t *const set = CPU_ALLOC(CORES);
    if (!set)
      return false;
    CPU_ZERO_S(CPU_ALLOC_SIZE(CORES), set);
    for (int i = 0; i < count; i++)
      CPU_SET_S(cores[i], CPU_ALLOC_SIZE(CORES), set);
    const bool done = !pthread_setaffinity_np(members_[member - 1].native_handle(), CPU_ALLOC_SIZE(CORES), set);
    CPU_FREE(set);
    return done;
#else
    return false;
#endif
  }

  // Runs `work(member)` in every member, with the caller as member 0, and waits for all.
  void run(const std::function<void(int)> &work) {
    work_ = &work;
    if (size_ > 1) {
      shares_[0].cpu.store(current_cpu(), std::memory_order_relaxed);
      step_.grow();
    }
    work(0);
    barrier();
  }

  // Returns the first of a member's own tasks.
  int begin_of(int member, int tasks) const { return (int)((int64_t)tasks * member / size_); }

  // Takes the next of `tasks` for `member`, or returns -1 if none is left since the last barrier. Each member first
  // takes a run of consecutive tasks, so that it reads memory in order, and then helps the others.
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

  // Waits for all members. All of them then see what each has written, and can take tasks again.
  void barrier() {
    const int phase = phase_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      for (auto &share : shares_)
        share.taken.store(0, std::memory_order_relaxed);
      phase_.grow();
    } else {
      phase_.wait(phase);
    }
  }

private:
  static constexpr int CORES = 1 << 16; // more than any system has

  struct alignas(64) Share {
    std::atomic<int> taken{0};
    std::atomic<int> cpu{-1}; // on which the member was when it began its last step
  };

  void end() {
    stop_ = true;
    step_.grow();
    for (auto &member : members_)
      member.join();
  }

  void serve(int member) {
    int seen = 0;
    for (;; seen++) {
      step_.wait(seen);
      if (stop_)
        return;
      leave_shared_cpu(member);
      (*work_)(member);
      barrier();
    }
  }

  static int current_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
  }

  // Moves the calling member to another CPU if one before it is on the same, and some CPU has none of them.
  void leave_shared_cpu(int member) {
#if defined(__linux__)
    const int cpu = current_cpu();
    bool shared = false;
    for (int i = 0; i < member; i++)
      shared |= shares_[i].cpu.load(std::memory_order_relaxed) == cpu;
    shares_[member].cpu.store(cpu, std::memory_order_relaxed);
    cpu_set_t allowed;
    if (!shared || sched_getaffinity(0, sizeof allowed, &allowed))
      return;
    cpu_set_t left = allowed;
    for (int i = 0; i < member; i++) {
      const int taken = shares_[i].cpu.load(std::memory_order_relaxed);
      if (taken >= 0 && taken < CPU_SETSIZE)
        CPU_CLR(taken, &left);
    }
    if (CPU_COUNT(&left) == 0 || sched_setaffinity(0, sizeof left, &left))
      return;
    shares_[member].cpu.store(current_cpu(), std::memory_order_relaxed);
    sched_setaffinity(0, sizeof allowed, &allowed); // only for the moment
#else
    (void)member;
#endif
  }

  int size_;
  std::vector<Share> shares_;
  std::vector<std::thread> members_;
  const std::function<void(int)> *work_ = nullptr;
  std::atomic<bool> stop_{false};
  Awaited step_;  // grows with each step
  Awaited phase_; // grows when all members have arrived at a barrier
  alignas(64) std::atomic<int> arrived_{0};
};
