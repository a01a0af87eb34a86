// AMX's tiles carried out by AVX512_BF16, so that the kernels of amx_*.h can be tested on processors without: -DEMULATE_TILES=ON of CMakeLists.txt.
#pragma once
#include "simd.h"

namespace TW_NAMESPACE {
static thread_local float emulated_tiles[8][16][16];

TW_INLINE void emulated_product(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    __m512 sum = _mm512_loadu_ps(emulated_tiles[c][m]);
    for (int k = 0; k < 16; k++)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(emulated_tiles[a][m][k]), (__m512bh)_mm512_loadu_ps(emulated_tiles[b][k]));
    _mm512_storeu_ps(emulated_tiles[c][m], sum);
  }
}
}  // namespace TW_NAMESPACE

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
#define _tile_zero(t) memset(emulated_tiles[t], 0, sizeof emulated_tiles[t])
#define _tile_loadd(t, from, stride) \
  for (int row = 0; row < 16; row++) memcpy(emulated_tiles[t][row], (const char*)(from) + row * (stride), 64)
#define _tile_stored(t, to, stride) \
  for (int row = 0; row < 16; row++) memcpy((char*)(to) + row * (stride), emulated_tiles[t][row], 64)
#define _tile_dpbf16ps(c, a, b) emulated_product(c, a, b)
