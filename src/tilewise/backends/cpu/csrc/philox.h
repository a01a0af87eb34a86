// Counter-based dropout: Philox-4x32-10 (Salmon et al., SC 2011), so that any tiling draws the same mask.
//
// Pair (query i, key j) of (batch, head) uses word j % 4 of the block at counter (j / 4, i, batch * heads_q + head, offset).
#pragma once
#include "simd.h"
#include "tilewise_cpu.h"

namespace TW_NAMESPACE {

// The high and low halves of a * m.
TW_INLINE void multiply_wide(vu a, uint32_t m, vu& high, vu& low) {
#if TW_VECTOR_BYTES == 64
  const __m512i x = (__m512i)a, y = _mm512_set1_epi64(m);
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  high = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low = (vu)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif TW_VECTOR_BYTES == 32
  const __m256i x = (__m256i)a, y = _mm256_set1_epi64x(m);
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
  TW_UNROLL for (int i = 0; i < L; i++) {
    const uint64_t product = (uint64_t)a[i] * m;
    high[i] = (uint32_t)(product >> 32);
    low[i] = (uint32_t)product;
  }
#endif
}

TW_INLINE vu splat_u(uint32_t x) { return (vu)splat((int32_t)x); }

// Four words for each lane's counter c[0..4), in place.
TW_INLINE void philox(vu* c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    vu high0, low0, high1, low1;
    multiply_wide(c[0], 0xd2511f53u, high0, low0);
    multiply_wide(c[2], 0xcd9e8d57u, high1, low1);
    c[0] = high1 ^ c[1] ^ splat_u(key0);
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ splat_u(key1);
    c[3] = low0;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

}  // namespace TW_NAMESPACE
