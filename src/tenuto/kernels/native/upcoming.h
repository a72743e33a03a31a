// Memory that a thread reads after the products that it computes.
#pragma once

#include <algorithm>
#include <cstdint>
#if defined(__linux__)
#include <unistd.h>
#endif

// Runs of memory of equal size, such as the parts that one layer has of pages. Products with enough rows keep the
// arithmetic units busy and leave the memory idle, so they call `fetch_some` between their blocks, and find what
// attention reads next in the caches.
class Upcoming {
public:
  // Sets the runs: `bytes` bytes at base + stride * i, for the numbers i from `first` to `last`. They are distributed
  // over about as many calls of `fetch_some` as will come, `calls`, as far as the memory can follow.
  void begin(const char *base, int64_t stride, int64_t bytes, const int32_t *first, const int32_t *last,
             int64_t calls) {
    base_ = base, stride_ = stride, bytes_ = bytes, at_ = end_ = nullptr;
    next_ = first, last_ = calls > 0 ? last : first;
    const int64_t lines = (last - first) * bytes / LINE;
    lines_ = (int)std::min((lines + calls) / std::max<int64_t>(calls, 1), MOST_LINES);
  }
  void end() { next_ = last_, at_ = end_; }

  void fetch_some() {
    if (at_ >= end_) {
      if (next_ == last_)
        return;
      at_ = base_ + *next_++ * stride_, end_ = at_ + bytes_;
    }
    for (int i = 0; i < lines_; i++)
      __builtin_prefetch(at_ + i * LINE, 0, 2);
    at_ += lines_ * LINE;
  }

  // Returns how much each of `threads` threads may fetch, in bytes, so that it is not evicted before it is read: its
  // L2 cache, and a part of the L3 cache, which others use, too.
  static int64_t room(int threads) {
#if defined(_SC_LEVEL2_CACHE_SIZE) && defined(_SC_LEVEL3_CACHE_SIZE)
    static const int64_t l2 = sysconf(_SC_LEVEL2_CACHE_SIZE), l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return std::max<int64_t>(l2, 0) + std::max<int64_t>(l3, 0) / (16 * threads);
#else
    return 0;
#endif
  }

private:
  static constexpr int64_t LINE = 64, MOST_LINES = 8; // with more, products wait for the memory

  const char *base_ = nullptr, *at_ = nullptr, *end_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0;
  const int32_t *next_ = nullptr, *last_ = nullptr;
  int lines_ = 0; // of a call
};
