// The C ABI of the CPU kernel: one plain struct of arguments, a handful of functions, no torch, no Python, no C++ in sight.
//
// Tensors are (batch, seqlen, heads, dim) with element strides for the first three; the last dimension is contiguous.
// Every function returns TW_OK or a status; the caller has checked shapes (nothing here re-checks them).
#pragma once
#include <stdint.h>

#define TW_ABI_VERSION 9

#if defined(_WIN32)
#define TW_EXPORT __declspec(dllexport)
#else
#define TW_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { TW_OK = 0, TW_NO_MEMORY = 1, TW_BAD_ABI = 2, TW_BAD_ISA = 3 };
enum { TW_FP32 = 0, TW_BF16 = 1, TW_FP16 = 2 };
enum { TW_ISA_AUTO = 0, TW_ISA_GENERIC = 1, TW_ISA_AVX2 = 2, TW_ISA_AVX512 = 3, TW_ISA_AVX512_BF16 = 4, TW_ISA_AMX = 5 };

// Rows of `row_ptr` of a plane: one entry for each TW_ROW_BLOCK query rows.
enum { TW_ROW_BLOCK = 96 };

typedef struct {
  const void* data;
  int64_t batch, seq, head;  // strides in elements
} tw_tensor;

// The mask of some (batch, head) pairs: a union of disjoint bands. Row r of `bands` is q0 q1 k0 k1 lo hi and allows
// the pairs with q0 <= i < q1, k0 <= j < k1, lo <= j - i <= hi. `row_ptr`/`row_bands` list the bands that touch each
// block of TW_ROW_BLOCK rows, by the first key that these see (null: every block looks at all of them).
// `in_bitmap[r]` != 0: of that rectangle only the pairs whose bit is set; bit i & 7 of byte (j * bits_stride + i / 8).
typedef struct {
  const int64_t* bands;
  int64_t n_bands;
  const int64_t* row_ptr;
  const int32_t* row_bands;
  const uint8_t* in_bitmap;
  const uint8_t* bits;
  int64_t bits_stride;
} tw_plane;

typedef struct {
  int32_t abi_version, isa, dtype, threads;
  int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v;
  float scale, softcap;  // softcap 0: none

  const tw_plane* planes;
  const int32_t* plane_of;  // (batch, heads_q), or null: plane 0 everywhere

  tw_tensor q, k, v, o, d_o;
  float* lse;          // (batch, heads_q, seqlen_q); null for a forward or decode whose caller does not want it
  const float* d_lse;  // (batch, heads_q, seqlen_q) or null
  float* row_max;      // forward or decode: (batch, heads_q, seqlen_q), each row's largest score before the sink, or null
  tw_tensor dq, dk, dv;

  tw_tensor bias;  // batch, seq = query, head strides, 0 where broadcast; data null: none
  int32_t bias_dtype;
  int32_t wide;     // whether dk and dv, and o of decode, are fp32, not of dtype
  tw_tensor dbias;  // fp32, zeroed by the caller, strides as the bias's; data null: not wanted

  const float* alibi_slopes;
  int64_t alibi_batch;      // stride between batches: 0 or heads_q
  const int64_t* diagonal;  // (seqlen_q,), or null: seqlen_k - seqlen_q
  const float* sink;        // (heads_q,) or null
  float* dsink;             // (heads_q,) or null

  uint32_t dropout_key[2], dropout_offset;  // Philox key and last counter word
  uint32_t dropout_threshold;               // a pair is kept iff its random word >= threshold
  float dropout_rescale;                    // 1 / (1 - p); 0: no dropout

  // Forward only: its way. few: by decode's kernels, key by key. documents > 0: each packed document of `args` (batch 1) as if it were called alone, so
  // that it has the bits of that. Row d of `bounds` is its queries and keys, q0 q1 k0 k1, every query in one document; document_planes[d] is its mask, in
  // its own rows and keys, and document_few[d] its `few`. lse is given then.
  int32_t few;
  int64_t documents;
  const int64_t* bounds;
  const tw_plane* document_planes;
  const uint8_t* document_few;

  // Where the queries, or heads, are a part of a larger call: whole_q is how many queries that has (0: seqlen_q), by which ways are chosen that give other
  // bits; dropout counts by its rows, (seqlen_q,) or null, and its heads, of which first_head is the first here (all_heads 0: these are all).
  int64_t whole_q;
  const int64_t* rows;
  int64_t first_head, all_heads;

  // Decode only: valid keys of each batch (null: seqlen_k; the bands hold no others), and a page table (null: none), where page p of batch b
  // starts at k.data + page_table[b * page_table_stride + p] * k.batch and holds page_size keys.
  const int32_t* seqlens_k;
  const int32_t* page_table;
  int64_t page_size, page_table_stride;

  // Decode only, each null for none. cu_seqlens_q (batch + 1,): row i of batch b is row cu_seqlens_q[b] + i of q and o, which have no batch; seqlen_q
  // is then all rows, lse and row_max are (heads_q, seqlen_q), and bands count each batch's own rows. cache_batch_idx (batch,): the entry of k and v
  // that holds a batch's keys. leftpad (batch,): the first key that may be seen. tree: of the tree_new newest keys of batch b, query and key t and u
  // of them are a visible pair only where tree[b * tree_batch + t * tree_new + u] != 0; the last query is the newest key.
  const int32_t* cu_seqlens_q;
  const int32_t* cache_batch_idx;
  const int32_t* leftpad;
  const uint8_t* tree;
  int64_t tree_batch, tree_new;

  void* workspace;  // tw_*_workspace(args) bytes, 64-byte aligned, uninitialised
} tw_args;

typedef struct {
  int32_t abi_version, sizeof_args, sizeof_plane, sizeof_tensor;
  int32_t best_isa;       // what TW_ISA_AUTO resolves to here
  uint32_t isas;          // bit i set: ISA i was compiled in and this processor has it
  int32_t shared_pool, reserved;  // 1: tw_set_pool was given a pool
} tw_info_t;

TW_EXPORT void tw_info(tw_info_t* info);
// Hands over GOMP_parallel of the OpenMP runtime that the process already uses, so that both share one pool of threads. Null: own threads.
TW_EXPORT void tw_set_pool(void* gomp_parallel);
// Tiles that computed around NaN or infinities (nonfinite.h), of all calls so far; for tests.
TW_EXPORT int64_t tw_careful_tiles(void);
TW_EXPORT int tw_forward(const tw_args* args);
// The instruction set whose kernels a forward, backward or decode of these arguments runs, or -1 where it is not to be had.
enum { TW_RUN_FORWARD = 0, TW_RUN_BACKWARD = 1, TW_RUN_DECODE = 2 };
TW_EXPORT int tw_isa_of(const tw_args* args, int run);
// tw_forward of arguments prepared once and other tensors of the same shapes and strides.
TW_EXPORT int tw_repeat(const tw_args* args, int threads, const void* q, const void* k, const void* v, void* o, float* lse);
// Likewise tw_backward; d_o, dq, dk, dv have the strides that the arguments give them.
TW_EXPORT int tw_repeat_backward(const tw_args* args, int threads, const void* q, const void* k, const void* v, const void* o, const float* lse,
                                 const void* d_o, void* dq, void* dk, void* dv, void* workspace);
TW_EXPORT int64_t tw_backward_workspace(const tw_args* args);
TW_EXPORT int tw_backward(const tw_args* args);
TW_EXPORT int64_t tw_decode_workspace(const tw_args* args);
TW_EXPORT int tw_decode(const tw_args* args);

#ifdef __cplusplus
}
#endif
