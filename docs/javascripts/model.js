/* What a call costs and what a GPU can give: src/tilewise/machine/roofline.py's formulas, for the page "Try it".
   tests/docs/test_explore.py compares every number with Python's. Sizes are in bytes, rates a second. */
"use strict";

const tilewise = (() => {
  const WARPGROUP = 128, STATISTIC_BYTES = 4, KB = 1024, WARPS = 64, REGISTERS = 255;
  const ITEMSIZE = { "bf16": 2, "e4m3": 1 };

  /* Visible pairs over all batches and heads; seqlen_q = seqlen_k. */
  function pairs(call) {
    const n = call.seqlen, each = call.causal ? n * (n + 1) / 2 : n * n;
    return call.batch * call.heads * each;
  }

  const rows = call => call.batch * call.heads * call.seqlen;
  const elements = call => rows(call) * call.head_dim;
  const flops = call => 4 * call.head_dim * pairs(call);

  /* Bytes between HBM and chip, by algorithm. */
  function traffic(call, tile) {
    const size = ITEMSIZE[call.dtype], d = call.head_dim, x = elements(call), statistics = rows(call) * STATISTIC_BYTES;
    const all = call.batch * call.heads * call.seqlen ** 2;
    const byKeys = Math.ceil(pairs(call) / tile.tile_n), byQueries = Math.ceil(pairs(call) / tile.tile_m);
    return {
      naive: (4 * x + 4 * all) * size,
      fa1: 2 * x * size + byKeys * (3 * d * size + 4 * STATISTIC_BYTES),
      fa2: 2 * x * size + statistics + byQueries * 2 * d * size,
      once: 4 * x * size + statistics,
    };
  }

  function sharedBytes(call, tile) {
    const row = call.head_dim * ITEMSIZE[call.dtype];
    return tile.tile_m * row + tile.stages * tile.tile_n * row * (tile.kv_shared ? 1 : 2) + tile.tile_m * tile.tile_n * tile.scores_bytes;
  }

  /* 32-bit registers of a thread that holds accumulators. */
  function accumulators(call, tile) {
    const scores = tile.scores_bytes ? 0 : tile.tile_m * tile.tile_n / tile.threads;
    return {
      acc_S: Math.ceil(scores),
      acc_O: Math.ceil(tile.tile_m * call.head_dim / tile.threads),
      P: Math.ceil(scores * ITEMSIZE[call.dtype] / 4),
    };
  }

  /* Blocks that each resource of an SM has room for. */
  function room(call, tile, machine) {
    const shared = sharedBytes(call, tile), held = accumulators(call, tile);
    const registers = tile.threads * (held.acc_S + held.acc_O + held.P);
    return {
      "shared memory": shared > machine.smem_block_bytes ? 0 : Math.floor(machine.smem_bytes / (shared + KB)),
      "registers": Math.floor(machine.registers / Math.max(1, registers)),
      "threads": Math.floor(machine.threads / tile.threads),
    };
  }

  /* Clocks of an SM for one warpgroup's step, 64 queries by tile_n keys: the figure "turns" of tools/worklog_figures.py. */
  function step(call, tile) {
    const scores = 64 * tile.tile_n, d = call.head_dim;
    const rate = call.dtype === "e4m3" ? 8192 : 4096;
    const products = 2 * Math.floor(scores * d * 2 / rate);
    const softmax = Math.floor(scores / 16) + Math.floor(scores / 64) + Math.floor(2 * scores / 128) + Math.floor(scores / 128)
      + Math.floor(64 * d / 128);
    return { products, softmax };
  }

  /* Everything above, and the time that nothing can beat: the longest of products, exponentials and operands moved once. */
  function estimate(call, tile, machine) {
    const work = flops(call), bytes = traffic(call, tile), rooms = room(call, tile, machine);
    const perSM = Math.min(...Object.values(rooms));
    const seconds = {
      compute: work / machine.peak[call.dtype],
      exponentials: pairs(call) / machine.exp_peak,
      memory: bytes.once / machine.hbm_bandwidth,
    };
    const bound = Object.keys(seconds).reduce((most, each) => seconds[each] > seconds[most] ? each : most);
    const blocks = call.batch * call.heads * Math.ceil(call.seqlen / tile.tile_m), slots = machine.sms * Math.max(1, perSM);
    const waves = Math.ceil(blocks / slots), { products, softmax } = step(call, tile);
    return {
      flops: work, bytes, rooms, seconds, bound, blocks, waves, products, softmax,
      shared_bytes: sharedBytes(call, tile),
      accumulators: accumulators(call, tile),
      blocks_per_sm: perSM,
      warps: perSM * tile.threads / 32,
      attainable: work / seconds[bound],
      idle_sms: Math.max(0, machine.sms - blocks),
      tail_efficiency: blocks / (waves * slots),
      in_step: products / (products + softmax),
      overlapped: products / Math.max(products, softmax),
    };
  }

  return { estimate, pairs, WARPGROUP, WARPS, KB, REGISTERS };
})();
