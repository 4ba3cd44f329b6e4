// Functions that Python calls by ctypes: hdet_kernels/ops/native_calls.py declares their arguments.
#pragma once

#define HDET_EXPORT extern "C" __attribute__((visibility("default")))
