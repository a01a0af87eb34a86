// Items of work on a pool of threads, and scratch memory that threads keep.
#pragma once
#include <stddef.h>
#include <stdint.h>

// One phase runs work(context, item, scratch) for every item in [0, items), handed out in ascending order; it starts when the one before is finished.
// `scratch` is scratch_bytes of 64-byte aligned memory of the thread's own, with anything in it.
typedef struct {
  void (*work)(const void* context, int64_t item, char* scratch);
  int64_t items;
  bool one_by_one;  // items wait for others: a thread takes no second one before it has done the first
} tw_phase;

// Runs the phases, in one go, on at most `threads` threads. Returns TW_OK, or TW_NO_MEMORY where not even one thread had its scratch.
int tw_run(const tw_phase* phases, int n_phases, int threads, size_t scratch_bytes, const void* context);
void tw_set_gomp_parallel(void* gomp_parallel);
int tw_has_shared_pool(void);
