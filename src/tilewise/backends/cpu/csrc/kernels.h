// The kernels of one instruction set, as dispatch.cpp picks them.
#pragma once
#include "threads.h"
#include "tilewise_cpu.h"

struct tw_kernels {
  int (*forward)(const tw_args&);
  int64_t (*backward_workspace)(const tw_args&);
  int (*backward)(const tw_args&);
  int64_t (*decode_workspace)(const tw_args&);
  int (*decode)(const tw_args&);
};
