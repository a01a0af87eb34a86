// dQ, dK, dV (and the gradients of bias and sink): FlashAttention-2's backward (Dao, arXiv:2307.08691, Algorithm 2), loops swapped: keys outside.
//
// A chunk of keys of one key/value head keeps K, V, dK, dV close and walks over the queries that see it, for each query head of the group:
//   S = K Q^T, P = exp(S - lse), dP = V dO^T, dS = P (dP - delta), dV += P dO, dK += dS Q, dQ += dS^T K,   delta = rowsum(dO O) - dlse.
// Scores are S[key][row] as in the forward. dQ rows are added to by several chunks: they take turns in ascending order (`Turns`), so there are no
// atomic sums, no partial copies, and the result is the same for any number of threads and any chunk size.
#pragma once
#include "gradients.h"

namespace TW_NAMESPACE {

constexpr int64_t kGradKeys = 192;  // most keys in flight
constexpr int kMaxChunkBlocks = 3;  // of so many keys, in a chunk
static_assert(kMaxChunkBlocks * kGradKeys <= NonFinite::kMost, "a chunk's keys have room in its list");

struct BackwardPlan {
  const tw_args& args;
  int64_t block;                      // keys in flight
  int64_t chunk, chunks;              // keys of a chunk, a multiple of block; chunks of a head
  int64_t batch_step, head_step;      // batches and key/value heads of one item: all of them where dbias is summed over them
  int64_t groups;                     // of heads (and batches)
  int64_t together;                   // groups of one item, with all of their chunks; 0: an item is one chunk of one group
  bool one_pass;                      // a single chunk, which finds delta and clears dQ itself
  float* delta;                       // (batch, heads_q, seqlen_q), where not
  float* lse;                         // likewise, of lse_of_rows; null without a sink
  bool local_dq;                      // a single chunk adds up dQ in its thread's scratch
  float* dq;                          // (batch, heads_q, seqlen_q, padded head_dim) fp32 where neither that nor args.dq will do
  int64_t* turns;                     // (chunks, groups)
  int64_t bytes;
};

constexpr int64_t kLocalDqBytes = 512 << 10;

static BackwardPlan plan_backward(const tw_args& a) {
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad);
  BackwardPlan p = {a, even_blocks(a.seqlen_k, kGradKeys), 0, 0, 1, 1, 0, 0, false, nullptr, nullptr, false, nullptr, nullptr, 0};
  if (a.dbias.data && a.dbias.batch == 0) p.batch_step = a.batch;
  if (a.dbias.data && a.dbias.head == 0) p.head_step = a.heads_k;
  p.groups = a.batch / max_of(p.batch_step, (int64_t)1) * (a.heads_k / p.head_step);
  int64_t blocks = max_of(min_of((int64_t)kMaxChunkBlocks, (int64_t)(300 << 10) / (kGradKeys * (dim + dim_v) * 4)), (int64_t)1);
  while (blocks > 1 && a.threads > 1 && p.groups * ((a.seqlen_k + blocks * p.block - 1) / (blocks * p.block)) < 4 * a.threads) blocks--;
  p.chunk = blocks * p.block;
  p.chunks = (a.seqlen_k + p.chunk - 1) / p.chunk;
  if (p.batch_step == 1) p.together = heads_together(a, p.groups, a.heads_k / p.head_step);
  Arena arena = {(char*)a.workspace};
  const int64_t rows = a.batch * a.heads_q * a.seqlen_q;
  p.turns = (int64_t*)arena.floats(2 * p.chunks * p.groups);
  p.one_pass = p.chunks == 1 && !a.dsink;
  p.delta = arena.floats(p.one_pass ? 0 : rows);
  if (a.dsink) p.lse = arena.floats(rows);
  const bool in_place = a.dtype == TW_FP32 && a.head_dim % kPad == 0;
  p.local_dq = !in_place && p.chunks == 1 && a.seqlen_q * dim * 4 <= kLocalDqBytes;
  if (!in_place && !p.local_dq) p.dq = arena.floats(rows * dim);
  p.bytes = (int64_t)arena.used;
  return p;
}

// The rows of dQ that a head adds up: the output itself, or fp32 scratch (`local`: of the thread, for one head at a time).
static RowsF32 dq_rows(const BackwardPlan& p, const Head& h, int64_t row, float* local = nullptr) {
  const int64_t dim = round_up(p.args.head_dim, kPad);
  if (p.local_dq) return {local + row * dim, dim};
  if (p.dq) return {p.dq + h.statistics(row) * dim, dim};
  return {(float*)p.args.dq.data + h.at(p.args.dq, row, h.head), p.args.dq.seq};
}

static void clear_dq(const BackwardPlan& p, const Head& h, int64_t row, int64_t rows, float* local = nullptr) {
  const int64_t dim = p.dq || p.local_dq ? round_up(p.args.head_dim, kPad) : p.args.head_dim;
  for (int64_t i = row; i < row + rows; i++) memset(dq_rows(p, h, i, local).data, 0, (size_t)dim * 4);
}

template <class Op>
struct BackwardScratch {
  GradBuffers buffers = {};
  float *k, *v, *k_vectors, *dk, *dv, *q, *d_o, *q_vectors, *d_o_vectors, *o, *lse, *delta, *dq, *finite_k, *finite_q, *finite_d_o;
  BackwardScratch(Arena& arena, const BackwardPlan& plan) {
    const tw_args& a = plan.args;
    const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad), scores = plan.block * kQueryBlock;
    dq = arena.floats(plan.local_dq ? a.seqlen_q * dim : 0);
    k = arena.floats(plan.chunk * dim);
    v = arena.floats(plan.chunk * dim_v);
    k_vectors = arena.floats(plan.chunk * dim);
    dk = arena.floats(plan.chunk * dim);
    dv = arena.floats(plan.chunk * dim_v);
    q = arena.floats(kQueryBlock * dim);
    d_o = arena.floats(kQueryBlock * dim_v);
    q_vectors = arena.floats(kQueryBlock * dim);
    d_o_vectors = arena.floats(kQueryBlock * dim_v);
    o = arena.floats(2 * kPanel * dim_v);  // and room for another panel
    lse = arena.floats(kQueryBlock);
    delta = arena.floats(kQueryBlock);
    buffers.p = arena.floats(scores);
    buffers.ds = arena.floats(scores);
    if (Op::kPack == 2) {
      buffers.p_rows = arena.floats(scores / 2);
      buffers.ds_rows = arena.floats(scores / 2);
      buffers.ds_keys = arena.floats(scores / 2);
    }
    if (a.dropout_rescale > 0) buffers.dropout = arena.floats(scores);
    if (a.softcap > 0) buffers.cap = arena.floats(scores);
    finite_k = arena.floats(plan.chunk * dim);
    finite_q = arena.floats(kQueryBlock * dim);
    finite_d_o = arena.floats(kQueryBlock * dim_v);
  }
};

// delta = rowsum(dO O) - dlse of a panel of rows, in lanes. A row adds it up exactly as it will add up dP, so that the two cancel to the last bit where
// it sees one key. O = 0 exactly (a row that saw nothing) counts as 0 against any dO; so does a row without lse. o: scratch of two panels; d_o: dO as a
// panel, or null.
template <class Op>
static void find_delta(float* delta, float* o, const float* d_o, const Head& h, int64_t row, int64_t rows) {
  const tw_args& a = h.args;
  Op::panel(o, h.out(a.o, row, h.head), a.o.seq, rows, a.head_dim_v, a.dtype);
  if (!d_o) {
    float* panel = o + kPanel * round_up(a.head_dim_v, kPad);
    Op::panel(panel, h.out(a.d_o, row, h.head), a.d_o.seq, rows, a.head_dim_v, a.dtype);
    d_o = panel;
  }
  const int64_t depth = (a.head_dim_v + Op::kPack - 1) / Op::kPack;
  for (int64_t v = 0; v * L < rows; v++) {
    vf sum = {};
    for (int64_t begin = 0; begin < depth; begin += kScoreChain) {
      vf part = {};
      for (int64_t c = begin; c < min_of(begin + kScoreChain, depth); c++) {
        const vf x = load(o + c * kPanel + v * L), y = load(d_o + c * kPanel + v * L);
        part = Op::multiply_add(part, x, Op::where_nonzero(x, y));
      }
      sum += part;
    }
    store(delta + v * L, sum);
  }
  for (int64_t i = 0; i < rows; i++) {
    const int64_t at = h.statistics(row + i);
    delta[i] = a.lse[at] == -kInf ? 0.f : delta[i] - (a.d_lse ? a.d_lse[at] : 0.f);
  }
}
template <class Op>
static void load_queries(QueryBlock& queries, const BackwardPlan& plan, const BackwardScratch<Op>& scratch, const Head& h, int64_t row) {
  const tw_args& a = plan.args;
  const int64_t rows = min_of(kQueryBlock, a.seqlen_q - row), dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad);
  const char *q = h.q(row), *d_o = h.out(a.d_o, row, h.head);
  queries = {row, rows, scratch.q, scratch.d_o, Op::vector_rows(scratch.q_vectors, q, a.q.seq, rows, a.head_dim, a.dtype),
             Op::vector_rows(scratch.d_o_vectors, d_o, a.d_o.seq, rows, a.head_dim_v, a.dtype), scratch.lse, scratch.delta, false, scratch.finite_q,
             scratch.finite_d_o};
  for (int64_t i = 0; i < rows; i += kPanel) {
    const int64_t n = min_of((int64_t)kPanel, rows - i);
    Op::panel(scratch.q + i * dim, h.q(row + i), a.q.seq, n, a.head_dim, a.dtype);
    Op::panel(scratch.d_o + i * dim_v, h.out(a.d_o, row + i, h.head), a.d_o.seq, n, a.head_dim_v, a.dtype);
    if (plan.one_pass) find_delta<Op>(queries.delta + i, scratch.o, scratch.d_o + i * dim_v, h, row + i, n);
  }
  if (!plan.one_pass) memcpy(queries.delta, plan.delta + h.statistics(row), (size_t)rows * sizeof(float));
  if (plan.lse) memcpy(queries.lse, plan.lse + h.statistics(row), (size_t)rows * sizeof(float));
  else lse_of_rows(queries.lse, h, row, rows);
  for (int64_t i = 0; i < rows; i++) queries.dead_rows |= queries.lse[i] == kInf;
  for (int64_t i = rows; i < round_up(rows, L); i++) queries.lse[i] = kInf, queries.delta[i] = 0.f;
}

// All the rows of one query head against a chunk, last rows first: under a causal mask every chunk sees those, so that chunks start together.
template <class Op>
static void walk_queries(const BackwardPlan& plan, const BackwardScratch<Op>& scratch, KeyChunk& keys, const Head& h, Turns& turns,
                         int64_t first_step) {
  const tw_args& a = plan.args;
  const RowRange seen = rows_that_see(h.plane, keys.key, keys.key + keys.keys, a.seqlen_q);
  const int64_t blocks = (a.seqlen_q + kQueryBlock - 1) / kQueryBlock;
  if (seen.begin >= seen.end) return;
  for (int64_t block = (seen.end - 1) / kQueryBlock; block >= seen.begin / kQueryBlock; block--) {
    const int64_t row = block * kQueryBlock, rows = min_of(kQueryBlock, a.seqlen_q - row), step = first_step + blocks - 1 - block;
    const BandList bands = bands_at(h.plane, row);
    QueryBlock queries;
    bool loaded = false;
    for (int64_t key = keys.key; key < keys.key + keys.keys; key += plan.block) {
      const int64_t n = min_of(plan.block, keys.key + keys.keys - key);
      for (int64_t x = bands.begin; x < bands.end; x++) {
        if (crop(bands, x, row, rows, key, n, 1).empty()) continue;
        if (!loaded) {
          turns.publish(step);
          load_queries<Op>(queries, plan, scratch, h, row);
          loaded = true;
        }
        grad_step<Op>(keys, queries, h, bands, x, key, n, scratch.buffers, dq_rows(plan, h, row, scratch.dq), turns, step);
      }
    }
    if (loaded) turns.publish(step + 1);
  }
}

// One chunk of keys, of the heads (and batches) of one group.
template <class Op>
static void backward_chunk(const BackwardPlan& plan, int64_t chunk, int64_t group, char* memory) {
  const tw_args& a = plan.args;
  Arena arena = {memory};
  const BackwardScratch<Op> scratch(arena, plan);
  const int64_t head_groups = a.heads_k / plan.head_step, per_kv = a.heads_q / a.heads_k;
  const int64_t batch0 = group / head_groups * plan.batch_step, head0 = group % head_groups * plan.head_step;
  const int64_t key = chunk * plan.chunk, n = min_of(plan.chunk, a.seqlen_k - key), blocks = (a.seqlen_q + kQueryBlock - 1) / kQueryBlock;
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad);
  Turns turns = {plan.turns, group, plan.groups, chunk, plan.chunks == 1 || plan.together > 0};
  const bool brief = a.seqlen_q <= kQueryBlock;  // what the chunk keeps close would be used once or twice
  const bool in_place = brief && a.dtype == TW_FP32 && a.head_dim % kPad == 0 && a.head_dim_v % kPad == 0;
  int64_t step = 0;
  for (int64_t batch = batch0; batch < batch0 + plan.batch_step; batch++)
    for (int64_t kv_head = head0; kv_head < head0 + plan.head_step; kv_head++) {
      const Head any(a, batch, kv_head * per_kv);
      KeyChunk keys = {key, n, Op::broadcast_rows(scratch.k, any.k(key), a.k.seq, n, a.head_dim, a.dtype),
                       Op::broadcast_rows(scratch.v, any.v(key), a.v.seq, n, a.head_dim_v, a.dtype),
                       Op::vector_rows(scratch.k_vectors, any.k(key), a.k.seq, n, a.head_dim, a.dtype, brief), {scratch.dk, dim}, {scratch.dv, dim_v},
                       1.f, scratch.finite_k};
      if (in_place) {
        keys.dk = {(float*)any.out(a.dk, key, kv_head), a.dk.seq}, keys.dv = {(float*)any.out(a.dv, key, kv_head), a.dv.seq};
        keys.dk_factor = a.scale;
      }
      for (int64_t j = 0; j < n; j++) memset(keys.dk.row(j), 0, (size_t)dim * 4), memset(keys.dv.row(j), 0, (size_t)dim_v * 4);
      const float one = 1.f;
      for (int64_t g = 0; g < per_kv; g++, step += blocks) {
        const Head h(a, batch, kv_head * per_kv + g);
        if (plan.one_pass || plan.local_dq) clear_dq(plan, h, 0, a.seqlen_q, scratch.dq);
        walk_queries<Op>(plan, scratch, keys, h, turns, step);
        if (!plan.local_dq) continue;
        store_rows(h.out(a.dq, 0, h.head), a.dq.seq, scratch.dq, dim, a.seqlen_q, a.head_dim, &one, 0, a.dtype);
      }
      if (in_place) continue;
      const int dtype = a.wide ? TW_FP32 : a.dtype;
      store_rows(any.in_wide(a.dk, key, kv_head), a.dk.seq, scratch.dk, dim, n, a.head_dim, &a.scale, 0, dtype);
      store_rows(any.in_wide(a.dv, key, kv_head), a.dv.seq, scratch.dv, dim_v, n, a.head_dim_v, &one, 0, dtype);
    }
  turns.publish(INT64_MAX);
}

// One chunk of one group, or all of some groups; chunks are added to dQ in ascending order either way.
template <class Op>
static void backward_item(const void* context, int64_t item, char* memory) {
  const BackwardPlan& plan = *(const BackwardPlan*)context;
  if (plan.together == 0) return backward_chunk<Op>(plan, item / plan.groups, item % plan.groups, memory);
  for (int64_t chunk = 0; chunk < plan.chunks; chunk++)
    for (int64_t group = item * plan.together; group < (item + 1) * plan.together; group++) backward_chunk<Op>(plan, chunk, group, memory);
}

// delta, LSE and dQ = 0, for one panel of rows.
template <class Op>
static void prepare_panel(const void* context, int64_t item, char* memory) {
  const BackwardPlan& plan = *(const BackwardPlan*)context;
  const tw_args& a = plan.args;
  const int64_t panels = (a.seqlen_q + kPanel - 1) / kPanel, head = item / panels, row = item % panels * kPanel;
  const Head h(a, head / a.heads_q, head % a.heads_q);
  const int64_t rows = min_of((int64_t)kPanel, a.seqlen_q - row);
  alignas(64) float delta[kPanel];
  find_delta<Op>(delta, (float*)memory, nullptr, h, row, rows);
  memcpy(plan.delta + h.statistics(row), delta, (size_t)rows * sizeof(float));
  if (plan.lse) lse_of_rows(plan.lse + h.statistics(row), h, row, rows);
  if (!plan.local_dq) clear_dq(plan, h, row, rows);
}

// dQ from scratch to the output, one panel of rows.
static void finish_panel_of_dq(const void* context, int64_t item, char*) {
  const BackwardPlan& plan = *(const BackwardPlan*)context;
  const tw_args& a = plan.args;
  const int64_t panels = (a.seqlen_q + kPanel - 1) / kPanel, head = item / panels, row = item % panels * kPanel;
  const Head h(a, head / a.heads_q, head % a.heads_q);
  const RowsF32 rows = dq_rows(plan, h, row);
  const float one = 1.f;
  store_rows(h.out(a.dq, row, h.head), a.dq.seq, rows.data, rows.stride, min_of((int64_t)kPanel, a.seqlen_q - row), a.head_dim, &one, 0, a.dtype);
}

static void sink_gradient(const void* context, int64_t head, char*) {
  const BackwardPlan& plan = *(const BackwardPlan*)context;
  sum_sink_gradient(plan.args, plan.delta, head);
}

static int64_t backward_workspace(const tw_args& a) { return plan_backward(a).bytes; }

template <class Op>
static int backward(const tw_args& a) {
  const BackwardPlan plan = plan_backward(a);
  memset(plan.turns, 0, (size_t)(plan.chunks * plan.groups) * sizeof(int64_t));
  const int64_t panels = a.batch * a.heads_q * ((a.seqlen_q + kPanel - 1) / kPanel);
  const tw_phase phases[4] = {
      {prepare_panel<Op>, plan.one_pass ? 0 : panels, false},
      {backward_item<Op>, plan.together ? plan.groups / plan.together : plan.chunks * plan.groups, plan.chunks > 1 && !plan.together},
      {finish_panel_of_dq, plan.dq ? panels : 0, false},
      {sink_gradient, a.dsink ? a.heads_q : 0, false},
  };
  Arena size = {nullptr};
  const BackwardScratch<Op> measure(size, plan);
  (void)measure;
  const size_t panel_bytes = (size_t)(2 * kPanel * round_up(a.head_dim_v, kPad)) * 4;
  return tw_run(phases, 4, useful_threads(a, 3), max_of(size.used, panel_bytes), &plan);
}

}  // namespace TW_NAMESPACE
