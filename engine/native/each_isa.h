// Includes KERNEL_FILE once for each instruction set of this platform, with KERNEL_ISA as its namespace
// and KERNEL_BYTES as the bytes of a register. One of the results is selected at run time.

#define KERNEL_ISA baseline
#define KERNEL_BYTES 16
#include KERNEL_FILE
#undef KERNEL_ISA
#undef KERNEL_BYTES

#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
#define KERNEL_X86 1
#include <immintrin.h>

#define KERNEL_ISA avx2
#define KERNEL_BYTES 32
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include KERNEL_FILE
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef KERNEL_ISA
#undef KERNEL_BYTES

#define KERNEL_ISA avx512
#define KERNEL_BYTES 64
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include KERNEL_FILE
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef KERNEL_ISA
#undef KERNEL_BYTES
#endif

namespace {

// Returns the functions for an instruction set: 0 baseline, 1 AVX2, 2 AVX-512.
Isa choose(int isa) {
#ifdef KERNEL_X86
    if (isa == 1) return avx2::ISA;
    if (isa == 2) return avx512::ISA;
#endif
    (void)isa;
    return baseline::ISA;
}

}  // namespace
