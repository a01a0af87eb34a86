// Elements as they lie in memory (fp32, bf16, fp16) to and from fp32 vectors.
//
// fp16 and bf16 are rounded to nearest even. `DT` is TW_FP32, TW_BF16 or TW_FP16; offsets are in elements.
#pragma once
#include "simd.h"
#include "tilewise_cpu.h"

namespace TW_NAMESPACE {

TW_INLINE constexpr int64_t element_bytes(int dtype) { return dtype == TW_FP32 ? 4 : 2; }
TW_INLINE const char* element(const void* base, int64_t offset, int dtype) { return (const char*)base + offset * element_bytes(dtype); }
TW_INLINE char* element(void* base, int64_t offset, int dtype) { return (char*)base + offset * element_bytes(dtype); }

typedef uint16_t halves __attribute__((vector_size(TW_VECTOR_BYTES / 2)));

TW_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
TW_INLINE float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

TW_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  const float x = (float)(int32_t)fraction * 0x1p-24f;  // subnormal or zero: through an integer, so that flushing denormals cannot touch it
  return sign ? -x : x;
}

TW_INLINE uint16_t to_half(float x) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  const uint16_t sign = (uint16_t)((u >> 16) & 0x8000);
  if (magnitude > 0x7f800000) return 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;                                               // rounds to 65520 or more: infinity
  if (magnitude < 0x38800000) return sign | (uint16_t)__builtin_rintf(float_of(magnitude) * 0x1p24f);  // subnormal: a multiple of 2^-24
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return sign | (uint16_t)((rounded - 0x38000000) >> 13);
}

template <int DT>
TW_INLINE float load_one(const char* p) {
  if (DT == TW_FP32) {
    float x;
    memcpy(&x, p, 4);
    return x;
  }
  uint16_t h;
  memcpy(&h, p, 2);
  return DT == TW_BF16 ? float_of((uint32_t)h << 16) : half_to_float(h);
}
TW_INLINE float load_one(const char* p, int dtype) {
  return dtype == TW_FP32 ? load_one<TW_FP32>(p) : dtype == TW_BF16 ? load_one<TW_BF16>(p) : load_one<TW_FP16>(p);
}

template <int DT>
TW_INLINE vf load_elements(const char* p) {
  if (DT == TW_FP32) return load((const float*)p);
#if TW_VECTOR_BYTES == 64
  const __m256i h = _mm256_loadu_si256((const __m256i*)p);
  if (DT == TW_BF16) return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
  return (vf)_mm512_cvtph_ps(h);
#elif TW_VECTOR_BYTES == 32
  const __m128i h = _mm_loadu_si128((const __m128i*)p);
  if (DT == TW_BF16) return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
  return (vf)_mm256_cvtph_ps(h);
#else
  vf x;
  TW_UNROLL for (int i = 0; i < L; i++) x[i] = load_one<DT>(p + 2 * i);
  return x;
#endif
}

template <int DT>
TW_INLINE void store_elements(char* p, vf x) {
  if (DT == TW_FP32) {
    store((float*)p, x);
    return;
  }
#if TW_VECTOR_BYTES == 64
  if (DT == TW_FP16) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#elif TW_VECTOR_BYTES == 32
  if (DT == TW_FP16) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
  if (DT == TW_BF16) {
    const vu u = (vu)x, quiet = (vu)splat((int32_t)0x7fc00000), rounded = u + 0x7fff + ((u >> 16) & 1);
    const halves h = __builtin_convertvector((x != x ? quiet : rounded) >> 16, halves);
    memcpy(p, &h, sizeof h);
    return;
  }
  uint16_t h[L];
  TW_UNROLL for (int i = 0; i < L; i++) h[i] = to_half(x[i]);
  memcpy(p, h, sizeof h);
}

// The first n <= L elements; the other lanes are 0. Never reads or writes beyond them.
template <int DT>
TW_INLINE vf load_first(const char* p, int64_t n) {
  if (n >= L) return load_elements<DT>(p);
#if TW_VECTOR_BYTES == 64
  const __mmask16 first = (__mmask16)((1u << max_of(n, (int64_t)0)) - 1);
  if (DT == TW_FP32) return (vf)_mm512_maskz_loadu_ps(first, p);
  const __m256i h = _mm256_maskz_loadu_epi16(first, p);
  if (DT == TW_BF16) return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
  return (vf)_mm512_cvtph_ps(h);
#endif
  char padded[L * 4] = {0};
  if (n > 0) memcpy(padded, p, (size_t)(n * element_bytes(DT)));
  return load_elements<DT>(padded);
}
template <int DT>
TW_INLINE void store_first(char* p, vf x, int64_t n) {
  if (n >= L) {
    store_elements<DT>(p, x);
    return;
  }
#if TW_VECTOR_BYTES == 64
  if (DT == TW_FP32) return _mm512_mask_storeu_ps(p, (__mmask16)((1u << max_of(n, (int64_t)0)) - 1), (__m512)x);
#endif
  char padded[L * 4];
  store_elements<DT>(padded, x);
  if (n > 0) memcpy(p, padded, (size_t)(n * element_bytes(DT)));
}

// rows x dim elements, `stride` apart, to fp32 rows of dim_padded (a multiple of L; zeros beyond dim).
template <int DT>
static void load_rows(float* out, int64_t dim_padded, const char* in, int64_t stride, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; r++) {
    const char* row = element(in, r * stride, DT);
    for (int64_t c = 0; c < dim_padded; c += L) store(out + r * dim_padded + c, load_first<DT>(element(row, c, DT), dim - c));
  }
}
static inline void load_rows(float* out, int64_t dim_padded, const char* in, int64_t stride, int64_t rows, int64_t dim, int dtype) {
  if (dtype == TW_FP32) return load_rows<TW_FP32>(out, dim_padded, in, stride, rows, dim);
  if (dtype == TW_BF16) return load_rows<TW_BF16>(out, dim_padded, in, stride, rows, dim);
  return load_rows<TW_FP16>(out, dim_padded, in, stride, rows, dim);
}

// fp32 rows of dim_padded to rows of dim elements, `stride` apart; row r is multiplied by factors[r * factor_step].
template <int DT>
static inline void store_rows(char* out, int64_t stride, const float* in, int64_t dim_padded, int64_t rows, int64_t dim, const float* factors,
                       int factor_step) {
  for (int64_t r = 0; r < rows; r++) {
    const vf factor = splat(factors[r * factor_step]);
    char* row = element(out, r * stride, DT);
    for (int64_t c = 0; c < dim; c += L) store_first<DT>(element(row, c, DT), load(in + r * dim_padded + c) * factor, dim - c);
  }
}
static inline void store_rows(char* out, int64_t stride, const float* in, int64_t dim_padded, int64_t rows, int64_t dim, const float* factors,
                       int factor_step, int dtype) {
  if (dtype == TW_FP32) return store_rows<TW_FP32>(out, stride, in, dim_padded, rows, dim, factors, factor_step);
  if (dtype == TW_BF16) return store_rows<TW_BF16>(out, stride, in, dim_padded, rows, dim, factors, factor_step);
  return store_rows<TW_FP16>(out, stride, in, dim_padded, rows, dim, factors, factor_step);
}

// Whether no element is NaN or infinite, whose exponent bits are all ones.
template <int DT>
static bool rows_finite(const char* in, int64_t stride, int64_t rows, int64_t dim) {
  const vi exponent = splat((int32_t)0x7f800000);
  vi found = {};
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < dim; c += L) found |= ((vi)load_first<DT>(element(in, r * stride + c, DT), dim - c) & exponent) == exponent;
  return !any_lane(found);
}
static inline bool rows_finite(const char* in, int64_t stride, int64_t rows, int64_t dim, int dtype) {
  if (dtype == TW_FP32) return rows_finite<TW_FP32>(in, stride, rows, dim);
  if (dtype == TW_BF16) return rows_finite<TW_BF16>(in, stride, rows, dim);
  return rows_finite<TW_FP16>(in, stride, rows, dim);
}

}  // namespace TW_NAMESPACE
