// The paged KV cache, with one struct for each type of keys and values.
#pragma once

#include <algorithm>

#include "weight_formats.h"

// The types of keys and values. The values are the numbers of `KVCacheDtype` in `elements.py`, which also has the sizes
// of pages.
enum class KvType : uint8_t { BF16 = 0, INT8 = 1 };

// Keys and values in pages of `page_size` token slots. A page has blocks of 16 slots for each layer and KV head, in the
// layout of the cache's type.
//
// All keys and values are finite: masked values are multiplied by 0, which does not make infinity or NaN disappear.
// Several threads may write neighbouring slots at once, so writing a slot must not touch another.
struct Cache {
  char *data = nullptr;
  int page_size, blocks, layers, kv_heads, head_dim; // `blocks`: of a page, for each head
  KvType type;

  // Returns the number of the block that has a position's slot, among the blocks of the sequence.
  int block_of(int position) const { return position / page_size * blocks + position % page_size / LANES; }
  // Returns whether a sequence's blocks form pairs that lie in one page each.
  bool pairs() const { return blocks % 2 == 0; }
  int64_t block_bytes() const;
  int64_t page_bytes() const { return layers * layer_bytes(); }
  int64_t layer_bytes() const { return (int64_t)kv_heads * blocks * block_bytes(); } // of a page, one run of memory
  // Returns the keys of block `index` of a page.
  char *block(int layer, int page, int head, int index) const {
    const int64_t first = layer * layer_bytes() + (int64_t)head * blocks * block_bytes();
    return data + page * page_bytes() + first + index * run_bytes();
  }
  // Returns the distance, in bytes, of a block's values from its keys.
  int64_t to_values() const;
  // Returns the distance, in bytes, of neighbouring blocks of a page.
  int64_t run_bytes() const { return type != KvType::BF16 ? block_bytes() : block_bytes() / 2; }
  // Returns whether the values of a page's blocks follow each other, behind the keys of all its blocks, so that a tile
  // can load those of two blocks. In other types each block has its values behind its own keys.
  bool values_apart() const { return type == KvType::BF16; }
  void write_key(char *block, int lane, const float *key) const;
  void write_value(char *block, int lane, const float *value) const;
};

// A type has a struct with these functions, and is added to the functions behind the structs:
//   block_bytes(cache)                 the size of a block's keys and values.
//   write_key, write_value             store float [head_dim] in a slot of a block; `values` are the block's values.
//   Element, pairs(p)                  unpack 16 pairs of elements for `attend_pairs`, unless the type has another
//   kernel.

// bfloat16: the keys of a block are [head_dim / 2][16 slots][2], so that a vector has a pair of dimensions of each of
// 16 slots. Values are [8 pairs of slots][head_dim][2], so that a vector has 16 dimensions of a pair of slots.
struct KvBf16 {
  using Element = uint16_t;

  static int block_bytes(const Cache &cache) { return 4 * LANES * cache.head_dim; }
  INLINE Pairs pairs(const Element *p) { return load_pairs(p); }

  static void write_key(const Cache &cache, char *block, int lane, const float *key) {
    uint32_t *to = (uint32_t *)block + lane;
    for (int d = 0; d < cache.head_dim; d += LANES, to += LANES * LANES / 2) {
      uint32_t pairs[LANES / 2];
      store(pairs, to_bf16(load<f32x16>(key + d)));
#pragma GCC unroll 8
      for (int i = 0; i < LANES / 2; i++)
        to[i * LANES] = pairs[i];
    }
  }
  static void write_value(const Cache &cache, char *block, char *values, int lane, const float *value) {
    uint16_t *to = (uint16_t *)values + lane / 2 * 2 * cache.head_dim;
    for (int d = 0; d < cache.head_dim; d += LANES, to += 2 * LANES)
      store_words(to, lane % 2, to_bf16_bits(load<f32x16>(value + d)));
  }
};

// 8-bit quants with scales. A block takes whole cache lines, and has three parts:
//   Keys plus 128, uint8 [head_dim / 4][16 slots][4].
//   Values, int8 [4 groups of 4 slots][head_dim][4].
//   Scales, bfloat16 [16 slots], for each part of 32 dimensions of the keys, and then for the values.
struct KvInt8 {
  // Returns the number of parts of a key. Each part has a scale.
  static int parts(const Cache &cache) { return (cache.head_dim + BLOCK - 1) / BLOCK; }
  static int block_bytes(const Cache &cache) { return 2 * LANES * cache.head_dim + (parts(cache) + 2) / 2 * 64; }
  // Returns the scales of a part of a block's keys, or, as part `parts(cache)`, of its values.
  static uint16_t *scales(const Cache &cache, const char *block, int part) {
    return (uint16_t *)(block + 2 * LANES * cache.head_dim) + part * LANES;
  }

  static void write_key(const Cache &cache, char *block, int lane, const float *key) {
    uint32_t *to = (uint32_t *)block + lane;
    float inverse = 0.0f;
    for (int d = 0; d < cache.head_dim; d += LANES, to += LANES * LANES / 4) {
      if (d % BLOCK == 0)
        inverse = set_scale(scales(cache, block, d / BLOCK) + lane, key + d, std::min(BLOCK, cache.head_dim - d));
      uint32_t fours[LANES / 4];
      store(fours, to_bytes(nearest(load<f32x16>(key + d) * inverse)));
      for (int i = 0; i < LANES / 4; i++)
        to[i * LANES] = fours[i] ^ 0x80808080u;
    }
  }
  static void write_value(const Cache &cache, char *block, char *values, int lane, const float *value) {
    const float inverse = set_scale(scales(cache, block, parts(cache)) + lane, value, cache.head_dim);
    uint8_t *to = (uint8_t *)values + lane / 4 * 4 * cache.head_dim;
    for (int d = 0; d < cache.head_dim; d += LANES, to += 4 * LANES)
      store_bytes(to, lane % 4, as<u32x16>(nearest(load<f32x16>(value + d) * inverse)));
  }

private:
  // Sets the scale for the quants of `count` numbers: the highest |x| / 127, rounded up to bfloat16, or 0 if that is
  // negligible. Returns the inverse of the scale, or 0.
  static float set_scale(uint16_t *scale, const float *v, int count) {
    f32x16 most = {};
    for (int d = 0; d < count; d += LANES)
      most = max16(most, max16(load<f32x16>(v + d), -load<f32x16>(v + d)));
    const float highest = highest16(most) / 127.0f;
    uint32_t bits;
    memcpy(&bits, &highest, 4);
    *scale = highest > 1e-30f ? (uint16_t)((bits + 0xFFFFu) >> 16) : 0;
    return *scale ? 1.0f / float_of(*scale) : 0.0f;
  }
};

// Calls `use` with an object of the struct for `type`, so that `use` is compiled for each.
template <class Use> INLINE void with_kv_type(KvType type, Use use) {
  if (type == KvType::INT8)
    return use(KvInt8());
  return use(KvBf16());
}

inline int64_t Cache::block_bytes() const {
  return type != KvType::BF16 ? KvInt8::block_bytes(*this) : KvBf16::block_bytes(*this);
}
inline int64_t Cache::to_values() const { return type != KvType::BF16 ? LANES * head_dim : blocks * run_bytes(); }
inline void Cache::write_key(char *block, int lane, const float *key) const {
  with_kv_type(type, [&](auto kv) { decltype(kv)::write_key(*this, block, lane, key); });
}
inline void Cache::write_value(char *block, int lane, const float *value) const {
  with_kv_type(type, [&](auto kv) { decltype(kv)::write_value(*this, block, block + to_values(), lane, value); });
}
