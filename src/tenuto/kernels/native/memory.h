// Memory of a forward pass.
#pragma once

#include <new>
#include <sys/mman.h>

#include "matmul_input.h"

// Memory in large pages where the system has them, initialised to zero.
class Memory {
public:
  Memory() = default;
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  ~Memory() { release(); }

  // Replaces the memory. Throws std::bad_alloc.
  void resize(int64_t bytes) {
    release();
    if (bytes == 0)
      return;
    constexpr int64_t PAGE = 1 << 21;
    if (bytes >= PAGE / 2) // else a large page would be mostly empty
      bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    void *got = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED)
      throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(got, (size_t)bytes, MADV_HUGEPAGE);
#endif
    data_ = got, bytes_ = bytes;
  }
  template <class T> T *as() const { return (T *)data_; }

private:
  void release() {
    if (data_)
      munmap(data_, (size_t)bytes_);
    data_ = nullptr, bytes_ = 0;
  }
  void *data_ = nullptr;
  int64_t bytes_ = 0;
};

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

// An input of products with its own memory.
class OwnInput {
public:
  void resize(int tokens, int columns) {
    int64_t cells = (int64_t)round_up(tokens, 2 * LANES) * round_up(columns, BLOCK), blocks = cells / BLOCK;
    values_.resize(cells * sizeof(float) + 64), fine_.resize(cells + 64);
    scales_.resize(blocks * 4 + 64), sums_.resize(blocks * 4 + 64), first_half_sums_.resize(blocks * 4 + 64);
    has_fine_.resize(blocks + 64);
  }
  Input view(int columns, InputType type) const {
    return {round_up(columns, BLOCK) / BLOCK,
            type,
            values_.as<int8_t>(),
            fine_.as<int8_t>(),
            scales_.as<float>(),
            sums_.as<float>(),
            first_half_sums_.as<float>(),
            has_fine_.as<uint8_t>(),
            values_.as<PairElement>(),
            values_.as<float>()};
  }

private:
  Memory values_, fine_, scales_, sums_, first_half_sums_, has_fine_;
};
