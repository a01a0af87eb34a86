// The two ways to multiply, and how operands are laid out for each.
//
// All five matrix products of attention are one microkernel (products.h), C[m][lanes] = sum_k A[m][k] * B[k][lanes], over 32-bit words:
// A is broadcast word by word, B is read as vectors. `Single`: a word is one fp32. `Pairs`: a word is two consecutive bf16 along k, multiplied and
// added in fp32 by one instruction (AVX512_BF16); half the steps, and Q, K, V, dO are used exactly as given, P and dS rounded to bf16.
// Operands by role:
//   broadcast rows  A[m][k], k along the head dimension: K for S = K Q^T, V for dP = V dO^T      (the tensor's own rows where possible)
//   panel           B[k][lane], lanes = query rows: Q^T and dO^T, transposed once per panel
//   vector rows     B[k][lane], lanes = head dimension, k = keys or queries: V, K, Q, dO
//   weights         A = P or dS, written by the softmax
#pragma once
#include "elements.h"

namespace TW_NAMESPACE {

// Words of a row that is broadcast: `stride` words apart.
struct Operand {
  const float* words;
  int64_t stride;
  Operand from(int64_t row) const { return {words + row * stride, stride}; }
};

TW_INLINE bool aligned(const char* p) { return (uintptr_t)p % 4 == 0; }  // as torch.frombuffer's tensors need not be

constexpr int64_t kPad = 16;  // head dimensions are padded to this in scratch

// The first n <= 4 L bytes as a vector; zeros beyond.
TW_INLINE vf load_bytes(const char* p, int64_t n) {
  if (n >= 4 * L) return load((const float*)p);
  float padded[L] = {0};
  if (n > 0) memcpy(padded, p, (size_t)n);
  return load(padded);
}

struct Single {
  static constexpr int kPack = 1;
  TW_INLINE vf multiply_add(vf acc, vf a, vf b) { return acc + a * b; }
  TW_INLINE vf where_nonzero(vf x, vf y) { return x == vf{} ? vf{} : y; }  // y, and 0 where x is 0
  TW_INLINE float weight(const float* words, int64_t stride, int64_t k) { return words[k * stride]; }  // of depth k

  static Operand broadcast_rows(float* scratch, const char* in, int64_t stride, int64_t rows, int64_t dim, int dtype) {
    if (dtype == TW_FP32 && aligned(in)) return {(const float*)in, stride};
    load_rows(scratch, round_up(dim, kPad), in, stride, rows, dim, dtype);
    return {scratch, round_up(dim, kPad)};
  }

  // Rows that lie densely, or serve a few query rows only (`briefly`), are used where they are; others are copied, because a power-of-two stride would
  // use only a few sets of the L1 cache.
  static Operand vector_rows(float* scratch, const char* in, int64_t stride, int64_t rows, int64_t dim, int dtype, bool briefly = false) {
    if (dtype == TW_FP32 && aligned(in) && dim % kPad == 0 && (briefly || stride <= 2 * dim)) return {(const float*)in, stride};
    load_rows(scratch, round_up(dim, kPad), in, stride, rows, dim, dtype);
    return {scratch, round_up(dim, kPad)};
  }

  template <int DT>
  static void panel_of(float* out, const char* in, int64_t stride, int64_t rows, int64_t dim) {
    for (int64_t c = 0; c < dim; c += L)
      for (int64_t v = 0; v * L < rows; v++) {  // nobody reads the vectors beyond
        vf r[L];
        TW_UNROLL for (int x = 0; x < L; x++) {
          const int64_t i = v * L + x;
          r[x] = i < rows ? load_first<DT>(element(in, i * stride + c, DT), dim - c) : vf{};
        }
        transpose(r);
        TW_UNROLL for (int x = 0; x < L; x++) store(out + (c + x) * kPanel + v * L, r[x]);
      }
  }
  static void panel(float* out, const char* in, int64_t stride, int64_t rows, int64_t dim, int dtype) {
    if (dtype == TW_FP32) return panel_of<TW_FP32>(out, in, stride, rows, dim);
    if (dtype == TW_BF16) return panel_of<TW_BF16>(out, in, stride, rows, dim);
    return panel_of<TW_FP16>(out, in, stride, rows, dim);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int kPack = 2;
  TW_INLINE vf multiply_add(vf acc, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
  TW_INLINE vf where_nonzero(vf x, vf y) {
    return (vf)_mm512_maskz_mov_epi16(_mm512_test_epi16_mask((__m512i)x, _mm512_set1_epi16(0x7fff)), (__m512i)y);
  }
  TW_INLINE float weight(const float* words, int64_t stride, int64_t k) {
    return load_one<TW_BF16>((const char*)(words + k / 2 * stride) + k % 2 * 2);
  }

  // An odd number of rows is followed by a row of zeros, so that keys can be taken two by two.
  static Operand broadcast_rows(float* scratch, const char* in, int64_t stride, int64_t rows, int64_t dim, int) {
    if (dim % 2 == 0 && stride % 2 == 0 && rows % 2 == 0 && aligned(in)) return {(const float*)in, stride / 2};
    const int64_t words = round_up(dim, 2 * kPad) / 2;
    for (int64_t r = 0; r < rows + rows % 2; r++)
      for (int64_t c = 0; c < words; c += L)
        store(scratch + r * words + c, r < rows ? load_bytes(in + (r * stride + 2 * c) * 2, 2 * dim - 4 * c) : vf{});
    return {scratch, words};
  }

  // Word c of row r holds (in[2 r][c], in[2 r + 1][c]).
  static Operand vector_rows(float* scratch, const char* in, int64_t stride, int64_t rows, int64_t dim, int, bool = false) {
    const int64_t dim_padded = round_up(dim, kPad);
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t c = 0; c < dim_padded; c += L) {
        const vi even = (vi)load_first<TW_BF16>(in + (r * stride + c) * 2, dim - c);
        const vi odd = r + 1 < rows ? (vi)load_first<TW_BF16>(in + ((r + 1) * stride + c) * 2, dim - c) : vi{};
        store(scratch + r / 2 * dim_padded + c, (vf)((vi)_mm512_srli_epi32((__m512i)even, 16) | odd));
      }
    return {scratch, dim_padded};
  }

  static void panel(float* out, const char* in, int64_t stride, int64_t rows, int64_t dim, int) {
    for (int64_t c = 0; 2 * c < dim; c += L)
      for (int64_t v = 0; v * L < rows; v++) {  // nobody reads the vectors beyond
        vf r[L];
        TW_UNROLL for (int x = 0; x < L; x++) {
          const int64_t i = v * L + x;
          r[x] = i < rows ? load_bytes(in + (i * stride + 2 * c) * 2, 2 * dim - 4 * c) : vf{};
        }
        transpose(r);
        TW_UNROLL for (int x = 0; x < L; x++) store(out + (c + x) * kPanel + v * L, r[x]);
      }
  }

  // Words (even, odd), each rounded to bf16.
  TW_INLINE vf interleave(vf even, vf odd) {
    const vi half = splat((int32_t)0x8000);
    const __m512i low = _mm512_srli_epi32((__m512i)((vi)even + half), 16), high = (__m512i)((vi)odd + half);
    return (vf)_mm512_mask_blend_epi16(0xaaaaaaaau, low, high);
  }
  // Lanes (0, 1), (2, 3), ... of x as L / 2 words.
  TW_INLINE void store_halves(float* out, vf x) { _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
};
#endif

}  // namespace TW_NAMESPACE
