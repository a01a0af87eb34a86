// Compiled once, for processors with AMX: bf16, fp16 and fp32 as sums of one, two and three bf16 numbers. Calls with finite numbers that are no such
// sums the AVX-512 kernels do, and backwards of fp16 and fp32 in which an infinity reaches dS; see forward_on_tiles.
#include "amx_backward.h"
#include "kernels.h"

namespace tw_avx512 {
extern const tw_kernels kernels;
}

namespace TW_NAMESPACE {

static int forward(const tw_args& a) {
  int32_t splits = 1;
  const int status = a.dtype == TW_BF16   ? forward_on_tiles<1>(a, &splits)
                     : a.dtype == TW_FP16 ? forward_on_tiles<2>(a, &splits)
                                          : forward_on_tiles<3>(a, &splits);
  return status || splits ? status : tw_avx512::kernels.forward(a);
}

static int64_t backward_workspace(const tw_args& a) {
  const int64_t bytes = a.dtype == TW_BF16   ? plan_tile_backward<1>(a, nullptr).bytes
                        : a.dtype == TW_FP16 ? plan_tile_backward<2>(a, nullptr).bytes
                                             : plan_tile_backward<3>(a, nullptr).bytes;
  return max_of(bytes, tw_avx512::kernels.backward_workspace(a));
}

// dbias is added to, so that a second run must find it as the first did.
static void clear_dbias(const tw_args& a) {
  const tw_tensor& d = a.dbias;
  const int64_t batches = d.batch ? a.batch : 1, heads = d.head ? a.heads_q : 1, rows = d.seq ? a.seqlen_q : 1;
  for (int64_t b = 0; d.data && b < batches; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < rows; i++) memset((float*)d.data + b * d.batch + h * d.head + i * d.seq, 0, (size_t)a.seqlen_k * sizeof(float));
}

static int backward(const tw_args& a) {
  int32_t splits = 1;
  const int status = a.dtype == TW_BF16   ? backward_on_tiles<1>(a, &splits)
                     : a.dtype == TW_FP16 ? backward_on_tiles<2>(a, &splits)
                                          : backward_on_tiles<3>(a, &splits);
  if (status || splits) return status;
  clear_dbias(a);
  return tw_avx512::kernels.backward(a);
}

extern const tw_kernels kernels;
const tw_kernels kernels = {forward, backward_workspace, backward, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace TW_NAMESPACE
