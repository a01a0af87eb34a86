// Vectors of fp32 and int32 for one instruction set: the only file, with elements.h, that knows intrinsics.
//
// TW_VECTOR_BYTES is 64 (AVX-512), 32 (AVX2 + FMA) or 16 (NEON, SSE2). GCC/Clang vector extensions give + - * and comparisons (which yield
// int vectors of 0 / -1, usable in ?:); the rest is here. Everything is static: nothing compiled for one instruction set may be
// picked by the linker for another, hence also no std:: templates in the kernel's translation units.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TW_INLINE static inline __attribute__((always_inline))
#define TW_MEMBER inline __attribute__((always_inline))
#define TW_APART __attribute__((noinline))  // rare work, whose code would change how what is around it is compiled
#define TW_UNROLL _Pragma("GCC unroll 32")

namespace TW_NAMESPACE {

typedef float vf __attribute__((vector_size(TW_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(TW_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(TW_VECTOR_BYTES)));
typedef float vf_unaligned __attribute__((vector_size(TW_VECTOR_BYTES), aligned(1), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(TW_VECTOR_BYTES), aligned(1), may_alias));

constexpr int L = TW_VECTOR_BYTES / 4;  // lanes

// Register tiles of acc[rows][vectors]: 24 accumulators where there are 32 registers, 12 where there are 16.
#if TW_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kColumnVectors = 4;  // widest tile whose lanes are the head dimension
constexpr int tile_rows(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : 12; }
#else
constexpr int kColumnVectors = 2;
constexpr int tile_rows(int vectors) { return vectors == 3 ? 4 : vectors == 2 ? 6 : 8; }
#endif
#if defined(__AMX_BF16__) || defined(TW_EMULATED_TILES)
constexpr int kPanelVectors = 1;  // a column of tiles
#else
constexpr int kPanelVectors = 3;
#endif
constexpr int kPanel = kPanelVectors * L;  // query rows in a panel, one a lane

template <class T>
TW_INLINE T min_of(T a, T b) { return a < b ? a : b; }
template <class T>
TW_INLINE T max_of(T a, T b) { return a > b ? a : b; }
TW_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

TW_INLINE vf load(const float* p) { return *(const vf_unaligned*)p; }
TW_INLINE void store(float* p, vf x) { *(vf_unaligned*)p = x; }
TW_INLINE vi load(const int32_t* p) { return *(const vi_unaligned*)p; }

// Bit-exact broadcast (the float may carry two packed bf16).
#if TW_VECTOR_BYTES == 64
TW_INLINE vf splat(float x) { return (vf)_mm512_set1_ps(x); }
TW_INLINE vi splat(int32_t x) { return (vi)_mm512_set1_epi32(x); }
#elif TW_VECTOR_BYTES == 32
TW_INLINE vf splat(float x) { return (vf)_mm256_set1_ps(x); }
TW_INLINE vi splat(int32_t x) { return (vi)_mm256_set1_epi32(x); }
#else
TW_INLINE vf splat(float x) { return (vf){x, x, x, x}; }
TW_INLINE vi splat(int32_t x) { return (vi){x, x, x, x}; }
#endif

TW_INLINE vi lane_index() {
  vi x;
  TW_UNROLL for (int i = 0; i < L; i++) x[i] = i;
  return x;
}

// a > b ? a : b, so that a NaN in b comes through and a NaN in a does not.
#if TW_VECTOR_BYTES == 64
TW_INLINE vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#elif TW_VECTOR_BYTES == 32
TW_INLINE vf maximum(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#else
TW_INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }
#endif

TW_INLINE float sum_lanes(vf x) {
#if TW_VECTOR_BYTES == 64
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s = x[0];
  TW_UNROLL for (int i = 1; i < L; i++) s += x[i];
  return s;
#endif
}

TW_INLINE bool any_lane(vi x) {
#if TW_VECTOR_BYTES == 64
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
  int32_t any = 0;
  TW_UNROLL for (int i = 0; i < L; i++) any |= x[i];
  return any != 0;
#endif
}

// -1 in the lanes whose bit is set, 0 in the others.
TW_INLINE vi lanes_of_bits(uint32_t bits) {
#if TW_VECTOR_BYTES == 64
  return (vi)_mm512_movm_epi32((__mmask16)bits);
#else
  vi one_bit;
  TW_UNROLL for (int i = 0; i < L; i++) one_bit[i] = 1 << i;
  return (splat((int32_t)bits) & one_bit) != splat((int32_t)0);
#endif
}

// Lane numbers as a type, for shuffles with constant indices.
template <int... K>
struct Lanes {};
#if TW_VECTOR_BYTES == 64
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> AllLanes;
#elif TW_VECTOR_BYTES == 32
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7> AllLanes;
#else
typedef Lanes<0, 1, 2, 3> AllLanes;
#endif

// One step of a transposition: in rows a and b, S apart, the off-diagonal blocks of S lanes change places.
template <int S, int... K>
TW_INLINE void exchange(vf& a, vf& b, Lanes<K...>) {
  const vf x = __builtin_shufflevector(a, b, ((K & S) == 0 ? K : L + K - S)...);
  b = __builtin_shufflevector(a, b, ((K & S) == 0 ? K + S : L + K)...);
  a = x;
}

template <int S>
TW_INLINE void exchange_rows(vf* r) {
  TW_UNROLL for (int i = 0; i < L; i++) if ((i & S) == 0) exchange<S>(r[i], r[i + S], AllLanes());
}

// Adds up the lanes of several vectors at once: a transposition whose steps add the two rows instead of keeping both. fold<1, L>(r) leaves the sum of
// the lanes of r[k] in lane k of r[0]; fold<1, N> and later fold<N, L / N> over L / N such results do the same in two parts.
template <int S, int N>
TW_INLINE void fold(vf* r) {
  if constexpr (N > 1) {
    TW_UNROLL for (int x = 0; x < N; x += 2) {
      exchange<S>(r[x], r[x + 1], AllLanes());
      r[x / 2] = r[x] + r[x + 1];
    }
    fold<2 * S, N / 2>(r);
  }
}

TW_INLINE float maximum_of_lanes(vf x) {
#if TW_VECTOR_BYTES == 64
  return _mm512_reduce_max_ps((__m512)x);
#else
  float m = x[0];
  TW_UNROLL for (int i = 1; i < L; i++) m = m > x[i] ? m : x[i];
  return m;
#endif
}

// Transposes the L x L matrix whose rows are r[0..L): log2(L) steps of L shuffles.
TW_INLINE void transpose(vf* r) {
  exchange_rows<1>(r);
  exchange_rows<2>(r);
#if TW_VECTOR_BYTES >= 32
  exchange_rows<4>(r);
#endif
#if TW_VECTOR_BYTES >= 64
  exchange_rows<8>(r);
#endif
}

}  // namespace TW_NAMESPACE
