// The kernels of one instruction set, as dispatch.cpp picks them.
#pragma once
#include "threads.h"
#include "tilewise_cpu.h"

extern int64_t tw_careful;  // see nonfinite.h

struct tw_kernels {
  int (*forward)(const tw_args&);
  int64_t (*backward_workspace)(const tw_args&);
  int (*backward)(const tw_args&);
  int64_t (*decode_workspace)(const tw_args&);
  int (*decode)(const tw_args&);
  bool (*few_rows)(const tw_args&);  // whether the following two serve a backward, better than the ones above
  int64_t (*few_workspace)(const tw_args&);
  int (*backward_of_few)(const tw_args&);
};
