// The exported functions: pick the kernels for this processor (CPUID), or the ones asked for.
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
namespace tw_amx { extern const tw_kernels kernels; }
namespace tw_avx512_bf16 { extern const tw_kernels kernels; }
namespace tw_avx512 { extern const tw_kernels kernels; }
namespace tw_avx2 { extern const tw_kernels kernels; }
#endif
namespace tw_generic { extern const tw_kernels kernels; }

namespace {

#if defined(__x86_64__)
// Linux gives a process the tile registers when it asks, once for all of its threads; it may refuse.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

uint32_t detect() {
  uint32_t isas = 1u << TW_ISA_GENERIC;
#if defined(__x86_64__)
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return isas;
  const bool fma_f16c = (c & bit_FMA) && (c & bit_F16C);
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  (void)high;
  if ((low & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return isas;
  if ((b & bit_AVX2) && fma_f16c) isas |= 1u << TW_ISA_AVX2;
  const unsigned avx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
  if ((low & 0xe6) != 0xe6 || (b & avx512) != avx512 || !fma_f16c) return isas;
  isas |= 1u << TW_ISA_AVX512;
  const bool amx = (d & (1u << 22)) && (d & (1u << 24)) && (low & 0x60000) == 0x60000;  // AMX_BF16, AMX_TILE, and the system saves tiles
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5))) isas |= 1u << TW_ISA_AVX512_BF16;
#if defined(TW_EMULATED_TILES)
  if (isas & 1u << TW_ISA_AVX512_BF16) return isas | 1u << TW_ISA_AMX;
#endif
  if (amx && (isas & 1u << TW_ISA_AVX512_BF16) && tiles_permitted()) isas |= 1u << TW_ISA_AMX;
#endif
  return isas;
}

const uint32_t isas_here = detect();
const int best_here = 31 - __builtin_clz(isas_here);

// Whether tiles are the faster way: below these sizes what they pad and pack costs more than they save (measured on a Sapphire Rapids or later; the
// table is in docs/cpu-notes.md). fp32 takes six products where the AVX-512 kernel takes one; its backward, which has less softmax to a
// product, pays from fewer tokens on where few rows of its tiles are empty.
bool tiles_pay(const tw_args& a, bool backward) {
  const int64_t queries = a.whole_q ? a.whole_q : a.seqlen_q, shorter = queries < a.seqlen_k ? queries : a.seqlen_k;
  if (a.dtype == TW_BF16) {
    const int64_t keys = a.head_dim + a.head_dim_v >= 128 ? 32 : 64;
    return (shorter >= 16 && queries + a.seqlen_k >= 40) || (queries > 8 && a.seqlen_k >= keys);
  }
  if (a.dtype == TW_FP16) return shorter >= 32;
  const int64_t dims = a.head_dim + a.head_dim_v, padded = ((queries + 31) & ~31) * ((a.seqlen_k + 31) & ~31);
  if (backward && shorter >= 96 && dims >= 64 && 100 * padded <= 115 * queries * a.seqlen_k) return true;
  return shorter >= (backward || dims >= 192 ? 192 : 320);
}

// The instruction set whose kernels serve a dtype under the name of `isa`, or -1 where this processor has no such instruction set.
int serving(int isa, int dtype) {
  if (isa < 0 || isa > 31 || !(isas_here & (1u << isa))) return -1;
  return isa == TW_ISA_AVX512_BF16 && dtype != TW_BF16 ? (int)TW_ISA_AVX512 : isa;
}

// Decoding, and the backward of a few queries, have no matrix products: neither tiles nor the bf16 instructions serve them.
int isa_of_few(const tw_args& a) {
  const int isa = serving(a.isa == TW_ISA_AUTO ? best_here : a.isa, TW_FP32);
  return isa == TW_ISA_AMX ? (int)TW_ISA_AVX512 : isa;
}
// The one asked for, or the fastest.
int isa_for(const tw_args& a, bool backward) {
  if (a.isa != TW_ISA_AUTO) return serving(a.isa, a.dtype);
  return serving(best_here == TW_ISA_AMX && !tiles_pay(a, backward) ? (int)TW_ISA_AVX512 : best_here, a.dtype);
}

const tw_kernels* kernels_of(int isa) {
#if defined(__x86_64__)
  if (isa == TW_ISA_AMX) return &tw_amx::kernels;
  if (isa == TW_ISA_AVX512_BF16) return &tw_avx512_bf16::kernels;
  if (isa == TW_ISA_AVX512) return &tw_avx512::kernels;
  if (isa == TW_ISA_AVX2) return &tw_avx2::kernels;
#endif
  return isa == TW_ISA_GENERIC ? &tw_generic::kernels : nullptr;
}

// The kernels for a backward of few rows, or null where it is none.
const tw_kernels* few_rows(const tw_args& a) {
  const tw_kernels* kernels = kernels_of(isa_of_few(a));
  return kernels && kernels->few_rows(a) ? kernels : nullptr;
}

}  // namespace

int tw_isa_of(const tw_args* a, int run) {
  return run == TW_RUN_DECODE || (run == TW_RUN_BACKWARD && few_rows(*a)) ? isa_of_few(*a) : isa_for(*a, run == TW_RUN_BACKWARD);
}

int64_t tw_backward_workspace(const tw_args* a) {
  if (const tw_kernels* few = few_rows(*a)) return few->few_workspace(*a);
  const tw_kernels* kernels = kernels_of(isa_for(*a, true));
  return kernels ? kernels->backward_workspace(*a) : 0;
}

int tw_backward(const tw_args* a) {
  if (a->abi_version != TW_ABI_VERSION) return TW_BAD_ABI;
  if (const tw_kernels* few = few_rows(*a)) return few->backward_of_few(*a);
  const tw_kernels* kernels = kernels_of(isa_for(*a, true));
  return kernels ? kernels->backward(*a) : TW_BAD_ISA;
}

int64_t tw_decode_workspace(const tw_args* a) {
  const tw_kernels* kernels = kernels_of(isa_of_few(*a));
  return kernels ? kernels->decode_workspace(*a) : 0;
}

int tw_decode(const tw_args* a) {
  if (a->abi_version != TW_ABI_VERSION) return TW_BAD_ABI;
  const tw_kernels* kernels = kernels_of(isa_of_few(*a));
  return kernels ? kernels->decode(*a) : TW_BAD_ISA;
}

namespace {

// A document and the work that it is.
struct Document {
  int64_t number;
  double work;
};
int most_work_first(const void* a, const void* b) {
  const double x = ((const Document*)a)->work, y = ((const Document*)b)->work;
  return x > y ? -1 : x < y ? 1 : ((const Document*)a)->number < ((const Document*)b)->number ? -1 : 1;
}

// How long `threads` take for documents that are theirs alone, each thread the next one as soon as it is free.
double time_apart(const Document* documents, int64_t n, int threads) {
  constexpr int kMost = 256;
  double busy[kMost] = {0}, last = 0;
  const int bins = threads < kMost ? threads : kMost;
  for (int64_t d = 0; d < n; d++) {
    int first = 0;
    for (int t = 1; t < bins; t++) first = busy[t] < busy[first] ? t : first;
    busy[first] += documents[d].work;
    last = busy[first] > last ? busy[first] : last;
  }
  return last;
}

// Packed documents, each a call of its own, whose LSE and largest scores are (heads_q, its rows) and are then put among the others'.
struct DocumentCalls {
  const tw_args& packed;
  const Document* order;
  int* status;

  const void* from(const tw_tensor& t, int64_t row) const { return (const char*)t.data + row * t.seq * (packed.dtype == TW_FP32 ? 4 : 2); }
  void run(int64_t d, int threads) const {
    const int64_t *b = packed.bounds + 4 * d, rows = b[1] - b[0], heads = packed.heads_q;
    if (rows == 0) return;
    float* statistics = (float*)malloc((size_t)(2 * heads * rows) * sizeof(float));
    if (!statistics) return fail(TW_NO_MEMORY);
    tw_args a = packed;
    a.threads = threads;
    a.seqlen_q = rows, a.seqlen_k = b[3] - b[2];
    a.documents = 0, a.whole_q = 0, a.few = packed.document_few[d];
    a.planes = packed.document_planes + d, a.plane_of = nullptr, a.diagonal = nullptr;
    a.q.data = from(a.q, b[0]), a.o.data = from(a.o, b[0]), a.k.data = from(a.k, b[2]), a.v.data = from(a.v, b[2]);
    a.lse = statistics;
    if (a.row_max) a.row_max = statistics + heads * rows;
    if (const int failed = tw_forward(&a)) fail(failed);
    for (int64_t h = 0; h < heads; h++) {
      memcpy(packed.lse + h * packed.seqlen_q + b[0], a.lse + h * rows, (size_t)rows * sizeof(float));
      if (a.row_max) memcpy(packed.row_max + h * packed.seqlen_q + b[0], a.row_max + h * rows, (size_t)rows * sizeof(float));
    }
    free(statistics);
  }
  void fail(int why) const { __atomic_store_n(status, why, __ATOMIC_RELAXED); }
};

void run_document(const void* context, int64_t item, char*) {
  const DocumentCalls& calls = *(const DocumentCalls*)context;
  calls.run(calls.order[item].number, 1);
}

int forward_documents(const tw_args& args) {
  int status = TW_OK;
  const int64_t documents = args.documents;
  Document* order = (Document*)malloc((size_t)documents * sizeof(Document));
  if (!order) return TW_NO_MEMORY;
  double all = 0;
  for (int64_t d = 0; d < documents; d++) {
    const int64_t* b = args.bounds + 4 * d;
    order[d] = {d, (double)(b[1] - b[0]) * (double)(b[3] - b[2] + 16)};  // 16: a row is packed and stored
    all += order[d].work;
  }
  qsort(order, (size_t)documents, sizeof(Document), most_work_first);
  const double work = all * (double)args.heads_q * (double)(args.head_dim + args.head_dim_v);
  const int threads = 1 + work / (1 << 20) < args.threads ? (int)(1 + work / (1 << 20)) : args.threads;
  // The largest are shared out among all threads, as many of them as it takes until the others, a thread each, leave nobody waiting for 3 % of the time.
  int64_t shared = 0;
  double rest = all;
  while (threads > 1 && shared < documents && time_apart(order + shared, documents - shared, threads) * threads > rest + 0.03 * all) {
    const int64_t more = shared / 2 + 1;
    for (int64_t end = shared + more < documents ? shared + more : documents; shared < end; shared++) rest -= order[shared].work;
  }
  const DocumentCalls calls = {args, order + shared, &status};
  for (int64_t d = 0; d < shared; d++) calls.run(order[d].number, args.threads);
  const tw_phase phase = {run_document, documents - shared, true};
  const int ran = tw_run(&phase, 1, threads, 64, &calls);
  free(order);
  return status ? status : ran;
}

// Decode's kernels, in a workspace that is had for the call.
int forward_of_few(tw_args a) {
  void* workspace = nullptr;
  if (posix_memalign(&workspace, 64, (size_t)tw_decode_workspace(&a) + 64) != 0) return TW_NO_MEMORY;
  a.workspace = workspace;
  const int status = tw_decode(&a);
  free(workspace);
  return status;
}

}  // namespace

int tw_forward(const tw_args* a) {
  if (a->abi_version != TW_ABI_VERSION) return TW_BAD_ABI;
  if (a->documents) return forward_documents(*a);
  if (a->few) return forward_of_few(*a);
  const tw_kernels* kernels = kernels_of(isa_for(*a, false));
  return kernels ? kernels->forward(*a) : TW_BAD_ISA;
}

int tw_repeat(const tw_args* prepared, int threads, const void* q, const void* k, const void* v, void* o, float* lse) {
  tw_args a = *prepared;
  a.threads = threads;
  a.q.data = q, a.k.data = k, a.v.data = v, a.o.data = o, a.lse = lse;
  return tw_forward(&a);
}

int tw_repeat_backward(const tw_args* prepared, int threads, const void* q, const void* k, const void* v, const void* o, const float* lse,
                       const void* d_o, void* dq, void* dk, void* dv, void* workspace) {
  tw_args a = *prepared;
  a.threads = threads;
  a.q.data = q, a.k.data = k, a.v.data = v, a.o.data = o, a.d_o.data = d_o, a.dq.data = dq, a.dk.data = dk, a.dv.data = dv;
  a.lse = (float*)lse;
  a.workspace = workspace;
  return tw_backward(&a);
}

int64_t tw_careful = 0;
int64_t tw_careful_tiles() { return __atomic_load_n(&tw_careful, __ATOMIC_RELAXED); }

void tw_set_pool(void* gomp_parallel) { tw_set_gomp_parallel(gomp_parallel); }

void tw_info(tw_info_t* info) {
  memset(info, 0, sizeof *info);
  info->abi_version = TW_ABI_VERSION;
  info->sizeof_args = (int32_t)sizeof(tw_args);
  info->sizeof_plane = (int32_t)sizeof(tw_plane);
  info->sizeof_tensor = (int32_t)sizeof(tw_tensor);
  info->best_isa = best_here;
  info->isas = isas_here;
  info->shared_pool = tw_has_shared_pool();
}
