// Compiled once for each instruction set, with TW_NAMESPACE and TW_VECTOR_BYTES defined and the matching -m flags.
#include "kernels.h"

#include "backward.h"
#include "forward.h"
#if !defined(__AVX512BF16__)
#include "decode_backward.h"
#endif

namespace TW_NAMESPACE {

extern const tw_kernels kernels;
#if defined(__AVX512BF16__)
// For bf16; all else is the AVX-512 build's.
const tw_kernels kernels = {forward<Pairs>, backward_workspace, backward<Pairs>, nullptr, nullptr, nullptr, nullptr, nullptr};
#else
const tw_kernels kernels = {forward<Single>, backward_workspace, backward<Single>, decode_workspace, decode, few_rows, few_workspace,
                            backward_of_few};
#endif

}  // namespace TW_NAMESPACE
