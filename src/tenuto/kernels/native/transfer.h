// Vectors from and to memory, at any address.
#pragma once

#include "target.h"

// How a vector is copied. One of several registers has its own: the compiler would copy it through the stack.
template <class V> struct Transfer {
  static V load(const void *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(void *p, V v) { memcpy(p, &v, sizeof v); }
};

template <class V> INLINE V load(const void *p) { return Transfer<V>::load(p); }
template <class V> INLINE void store(void *p, V v) { Transfer<V>::store(p, v); }
