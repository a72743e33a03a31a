// Dot products of bytes, and of words, on x86-64 CPUs without VNNI. One instruction adds pairs of products of bytes
// into 16 bits, and another adds pairs of products of words into 32.
#pragma once

#include <cstring>

INLINE u32x16 four_bytes(const void *p) { // in each lane
  uint32_t quad;
  memcpy(&quad, p, 4);
  return u32x16{} + quad;
}

// Numbers of 16 bits, four for each of 16 lanes: the first two of each, and the others.
struct Words {
  u32x16 first, second;
};
INLINE Words unsigned_words(u32x16 bytes) {
  return {reordered(bytes, {0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1}),
          reordered(bytes, {2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1})};
}
INLINE Words signed_words(u32x16 bytes) {
  return {high_bytes(reordered(bytes, {-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13})),
          high_bytes(reordered(bytes, {-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15}))};
}

INLINE i32x16 word_sums(i32x16 words) { return word_products(as<u32x16>(words), u32x16{} + 0x00010001u); }

// The dot products of a block of unsigned weights of `BITS` bits with signed inputs above -128. A vector has 4 weights,
// of neighbouring inputs, for each of 16 outputs. Weights of at most 4 bits leave room in 16 bits for the sums of a
// whole block. Weights of 8 bits are made signed first, and their signs are moved to the inputs.
struct Dot {
  static constexpr int OFFSET = 128; // subtracted from 8-bit weights
  i32x16 sum = {};

  // Adds to lane n the dot product of the four bytes w[4 n ...] and the four bytes at `x`.
  template <int BITS> void add(u32x16 w, const int8_t *x) {
    u32x16 inputs = four_bytes(x);
    if constexpr (BITS == 8) {
      const u32x16 q = w ^ 0x80808080u;
      w = sizes_of_bytes(q), inputs = with_signs(inputs, q);
    }
    const i32x16 words = byte_products(w, inputs);
    sum = added(BITS > 4 ? sum + word_sums(words) : add_words(sum, words));
  }
  template <int BITS> i32x16 total() const { return BITS > 4 ? sum : word_sums(sum); }
};

// The number of quads that `add_quads` takes: those whose products fit 16 bits when they are added up.
constexpr int quads_at_once(int bits) { return bits == 5 ? QUADS_OF_5_BITS : bits == 6 ? 2 : 1; }
// Adds the products of COUNT quads of weights and the inputs at `x`.
template <int BITS, int COUNT> INLINE void add_quads(Dot &dot, const u32x16 (&w)[COUNT], const int8_t *x) {
  if constexpr (COUNT == 1) {
    dot.add<BITS>(w[0], x);
  } else {
    static_assert(2 * COUNT * 127 * ((1 << BITS) - 1) < 32768, "sums must fit 16 bits");
    i32x16 words = byte_products(w[0], four_bytes(x));
#pragma GCC unroll 4
    for (int i = 1; i < COUNT; i++)
      words = add_words(words, byte_products(w[i], four_bytes(x + 4 * i)));
    dot.sum = added(dot.sum + word_sums(words));
  }
}

// The dot products of four words in each of 16 lanes with the four words at `x`. Sums must fit 32 bits.
struct WordDot {
  i32x16 sum = {};

  void add(const Words &lanes, const int16_t *x) {
    sum = added(sum + word_products(lanes.first, four_bytes(x)));
    sum = added(sum + word_products(lanes.second, four_bytes(x + 2)));
  }
};
