// Quants of at most 15 bits, those of queries and of softmax weights, and the sums of their products with the bytes of
// an INT8 cache.
#pragma once

#include "attention_blocks.h"

// COUNT quants, as words or as the two bytes of 128 * coarse + fine: the CPU multiplies one of these faster.
// `set_unsigned` takes numbers from 0 to 2^14 - 1.
#if TENUTO_WORDS
template <int COUNT> struct Quants {
  alignas(64) int16_t words[COUNT];

  void set_signed(int at, i32x16 v) { store(words + at, to_words(as<u32x16>(v) & 0xFFFFu)); }
  void set_unsigned(int at, i32x16 v) { store(words + at, to_words(as<u32x16>(v))); }
  void set_unsigned(int at, const i32x16 (&v)[4]) {
    for (int i = 0; i < 4; i++)
      set_unsigned(at + i * LANES, v[i]);
  }
  void clear(int count) { memset(words, 0, count * sizeof *words); }
};
#else
template <int COUNT> struct Quants {
  alignas(64) int8_t coarse[COUNT], fine[COUNT];

  void set_signed(int at, i32x16 v) {
    const i32x16 high = (v + 64) >> 7;
    store(coarse + at, to_bytes(high)), store(fine + at, to_bytes(v - (high << 7)));
  }
  void set_unsigned(int at, i32x16 v) { store(coarse + at, to_bytes(v >> 7)), store(fine + at, to_bytes(v & 127)); }
  void set_unsigned(int at, const i32x16 (&v)[4]) { store_split((uint8_t *)coarse + at, (uint8_t *)fine + at, v); }
  void clear(int count) { memset(coarse, 0, count), memset(fine, 0, count); }
};
#endif

#if TENUTO_I8MM
#include "attention_neon.h"
#else
// The sums of the products of keys, or of values, with quants, for 16 lanes. `add` takes four bytes of each lane from
// each of `VECTORS` vectors, and as many quants. A row has `SUMS` sums in registers.
#if TENUTO_WORDS
template <bool KEYS> struct WordSums {
  static constexpr int OFFSET = 0, VECTORS = 1, SUMS = 1;

  template <class Quants> void add(const u32x16 (&lanes)[VECTORS], const Quants &quants, int at) {
    dot_.add(KEYS ? unsigned_words(lanes[0]) : signed_words(lanes[0]), quants.words + at);
  }
  u32x16 total() const { return as<u32x16>(dot_.sum); }

private:
  WordDot dot_;
};
typedef WordSums<true> KeySums;
typedef WordSums<false> ValueSums;
#else
struct KeySums {
  static constexpr int OFFSET = KeyDot::OFFSET, VECTORS = 1, SUMS = 2;

  template <class Quants> void add(const u32x16 (&lanes)[VECTORS], const Quants &quants, int at) {
    coarse_.add<8>(lanes[0], quants.coarse + at), fine_.add<8>(lanes[0], quants.fine + at);
  }
  u32x16 total() const { return (as<u32x16>(coarse_.total<8>()) << 7) + as<u32x16>(fine_.total<8>()); }

private:
  KeyDot coarse_, fine_;
};
struct ValueSums {
  static constexpr int VECTORS = 1, SUMS = 2;

  template <class Quants> void add(const u32x16 (&lanes)[VECTORS], const Quants &quants, int at) {
    coarse_.add(lanes[0], (const uint8_t *)quants.coarse + at), fine_.add(lanes[0], (const uint8_t *)quants.fine + at);
  }
  u32x16 total() const { return (as<u32x16>(coarse_.total()) << 7) + as<u32x16>(fine_.total()); }

private:
  UnsignedDot coarse_, fine_;
};
#endif
#endif
