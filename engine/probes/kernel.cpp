// The figures of a tensor in one pass over memory: mean, std, min, max, l2, absmax, zeros, nan, inf.
//
// Plain C interface, no torch: kernel.py loads it with ctypes. A tensor is walked in blocks that fit
// the first-level cache. A block whose values are all finite takes one sweep; a sum that is not
// finite says that some are not, and the block is swept again with a mask. Where the mean dwarfs the
// deviation the block is swept a second time about its mean. Blocks are merged in double by Chan's
// formula. Narrow types are widened a block at a time into a buffer that stays in the cache.
//
// On x86-64 the file includes itself once for each instruction set; the choice is made when called.

#ifndef KERNEL_ISA

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

enum Type : int32_t { F32, F64, BF16, F16, I8, I16, I32, I64, U8, BOOL, NUM_TYPES };

constexpr int64_t BLOCK = 2048;
constexpr int NUM_FIGURES = 9;
constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double NAN_ = std::numeric_limits<double>::quiet_NaN();
constexpr double CANCELS = 1e-6;           // var / mean square below which a block is swept again
constexpr double LARGE = 1e140, SMALL = 1e-140;  // squares beyond these need a scale

// What is known of a block, or of the blocks so far; of the finite values but for the counts.
struct Sums {
    int64_t num = 0, num_zeros = 0, num_nan = 0, num_inf = 0;
    double sum = 0, squares = 0, low = INF, high = -INF;
    double about_mean = 0;  // sum of the squared deviations from the mean

    void add(const Sums& b) {
        if (b.num) {
            if (num) {
                const double apart = b.sum / b.num - sum / num;
                about_mean += apart * apart * (double(num) * double(b.num) / double(num + b.num));
            }
            about_mean += b.about_mean;
            num += b.num;
            sum += b.sum;
            squares += b.squares;
            low = b.low < low ? b.low : low;
            high = b.high > high ? b.high : high;
        }
        num_zeros += b.num_zeros;
        num_nan += b.num_nan;
        num_inf += b.num_inf;
    }
};

}  // namespace

#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
#define KERNEL_X86 1
#endif

#define KERNEL_ISA baseline
#define KERNEL_BYTES 16
#include "kernel.cpp"
#undef KERNEL_ISA
#undef KERNEL_BYTES

#ifdef KERNEL_X86
#define KERNEL_ISA avx2
#define KERNEL_BYTES 32
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "kernel.cpp"
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
#include "kernel.cpp"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef KERNEL_ISA
#undef KERNEL_BYTES
#endif

namespace {

using Summarize = void (*)(const void*, int64_t, int32_t, double*);

// The instruction sets of this machine: 0 baseline, 1 AVX2, 2 AVX-512.
int best_isa() {
#ifdef KERNEL_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        const bool is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        return is_wide ? 2 : 1;
    }
#endif
    return 0;
}

Summarize choose(int isa) {
#ifdef KERNEL_X86
    if (isa == 1) return avx2::summarize;
    if (isa == 2) return avx512::summarize;
#endif
    return baseline::summarize;
}

}  // namespace

#ifndef KERNEL_SOURCE
#define KERNEL_SOURCE 0
#endif

extern "C" {

// Names the source that this library was built from.
uint64_t glasshouse_kernel_source() { return KERNEL_SOURCE; }

int32_t glasshouse_kernel_isa() { return best_isa(); }

// The figures of `count` tensors, nine after nine. `isa` above what the machine has is lowered;
// below zero means the best. Returns 0, or 1 for a type that is not known.
int32_t glasshouse_summarize(int64_t count, const void* const* data, const int64_t* sizes,
                             const int32_t* types, double* figures, int32_t isa) {
    static const int best = best_isa();
    const Summarize summarize = choose(isa < 0 || isa > best ? best : isa);
    for (int64_t i = 0; i < count; i++) {
        if (types[i] < 0 || types[i] >= NUM_TYPES) return 1;
        summarize(data[i], sizes[i], types[i], figures + i * NUM_FIGURES);
    }
    return 0;
}

}  // extern "C"

#else  // KERNEL_ISA: what follows is compiled once for each instruction set

namespace {
namespace KERNEL_ISA {

constexpr int F = KERNEL_BYTES / 4, D = KERNEL_BYTES / 8;  // floats, doubles of a register

typedef float floats __attribute__((vector_size(KERNEL_BYTES)));
typedef int32_t ints __attribute__((vector_size(KERNEL_BYTES)));
typedef double doubles __attribute__((vector_size(KERNEL_BYTES)));
typedef int64_t longs __attribute__((vector_size(KERNEL_BYTES)));

// Vectors are loaded through these, because a tensor may lie at any address.
typedef float floats_at __attribute__((vector_size(KERNEL_BYTES), aligned(4), may_alias));
typedef double doubles_at __attribute__((vector_size(KERNEL_BYTES), aligned(8), may_alias));
template <class T>
struct Narrow;  // as many as fill a register when widened to double
template <>
struct Narrow<float> {
    typedef float at __attribute__((vector_size(KERNEL_BYTES / 2), aligned(4), may_alias));
};
template <>
struct Narrow<double> {
    typedef doubles_at at;
};

template <class T>
static inline doubles load_doubles(const T* x) {
    return __builtin_convertvector(*reinterpret_cast<const typename Narrow<T>::at*>(x), doubles);
}

template <class V>
static inline double total(const V& v) {
    double sum = 0;
    for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); i++) sum += double(v[i]);
    return sum;
}

template <class V>
static inline void extremes(const V& low, const V& high, Sums& s) {
    for (unsigned i = 0; i < sizeof(V) / sizeof(low[0]); i++) {
        s.low = low[i] < s.low ? double(low[i]) : s.low;
        s.high = high[i] > s.high ? double(high[i]) : s.high;
    }
}

static inline void sweep_tail(double v, Sums& s) {
    s.sum += v;
    s.squares += v * v;
    s.low = v < s.low ? v : s.low;
    s.high = v > s.high ? v : s.high;
    s.num_zeros += v == 0;
}

// One sweep, right when every value is finite; else its sum of squares is not finite.
static void sweep(const float* x, int64_t n, Sums& s) {
    floats low = floats{} + float(INF), high = floats{} - float(INF);
    doubles sum0{}, sum1{}, squares0{}, squares1{};
    ints zeros{};
    int64_t i = 0;
    for (; i + F <= n; i += F) {
        const floats v = *reinterpret_cast<const floats_at*>(x + i);
        const doubles a = load_doubles(x + i);
        const doubles b = load_doubles(x + i + D);
        low = v < low ? v : low;
        high = v > high ? v : high;
        zeros -= (ints)(v == 0.0f);
        sum0 += a;
        sum1 += b;
        squares0 += a * a;
        squares1 += b * b;
    }
    s.num = n;
    s.sum = total(sum0 + sum1);
    s.squares = total(squares0 + squares1);
    s.num_zeros = int64_t(total(zeros));
    extremes(low, high, s);
    for (; i < n; i++) sweep_tail(x[i], s);
}

static void sweep(const double* x, int64_t n, Sums& s) {
    doubles low = doubles{} + INF, high = doubles{} - INF;
    doubles sum{}, squares{};
    longs zeros{};
    int64_t i = 0;
    for (; i + D <= n; i += D) {
        const doubles v = *reinterpret_cast<const doubles_at*>(x + i);
        low = v < low ? v : low;
        high = v > high ? v : high;
        zeros -= (longs)(v == 0.0);
        sum += v;
        squares += v * v;
    }
    s.num = n;
    s.sum = total(sum);
    s.squares = total(squares);
    s.num_zeros = int64_t(total(zeros));
    extremes(low, high, s);
    for (; i < n; i++) sweep_tail(x[i], s);
}

// The squared deviations from the block's mean, and what they say of the mean itself.
template <class T>
static void sweep_about_mean(const T* x, int64_t n, Sums& s) {
    const double mean = s.sum / double(n);
    doubles drift{}, squares{};
    int64_t i = 0;
    for (; i + D <= n; i += D) {
        const doubles d = load_doubles(x + i) - mean;
        drift += d;
        squares += d * d;
    }
    double drifted = total(drift), sum = total(squares);
    for (; i < n; i++) {
        const double d = double(x[i]) - mean;
        drifted += d;
        sum += d * d;
    }
    sum -= drifted * drifted / double(n);
    s.about_mean = sum > 0 ? sum : 0;
}

// Puts the finite values together at the front of `kept`, and counts the others.
template <class T>
static int64_t keep_finite(const T* x, int64_t n, T* kept, Sums& s) {
    int64_t num = 0, num_nan = 0;
    for (int64_t i = 0; i < n; i++) {
        const T v = x[i];
        kept[num] = v;
        num += (v - v == 0) ? 1 : 0;
        num_nan += v != v ? 1 : 0;
    }
    s.num_nan = num_nan;
    s.num_inf = n - num - num_nan;
    return num;
}

template <class T>
static void add_block(const T* x, int64_t n, Sums& whole) {
    Sums s;
    sweep(x, n, s);
    T kept[BLOCK + 1];
    if (!(s.squares < INF)) {
        s = Sums();
        n = keep_finite(x, n, kept, s);
        x = kept;
        const int64_t num_nan = s.num_nan, num_inf = s.num_inf;
        if (n) {
            s = Sums();
            sweep(x, n, s);
        }
        s.num_nan = num_nan;
        s.num_inf = num_inf;
    }
    if (n) {
        s.about_mean = s.squares - s.sum * (s.sum / double(n));
        if (!(s.about_mean >= CANCELS * s.squares)) sweep_about_mean(x, n, s);
    }
    whole.add(s);
}

static inline float bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

static inline float float16(uint16_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;  // an exponent 112 too small
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    wide |= uint32_t(bits & 0x8000) << 16;
    wide |= magnitude >= 0x0f800000 ? 0x7f800000 : 0;
    std::memcpy(&value, &wide, 4);
    return value;
}

template <class From, class To>
static inline To widen(From v) {
    return To(v);
}

template <class From, class To, To (*wide)(From)>
static void walk(const void* data, int64_t n, Sums& whole) {
    const From* x = static_cast<const From*>(data);
    To buffer[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t num = n - start < BLOCK ? n - start : BLOCK;
        for (int64_t i = 0; i < num; i++) buffer[i] = wide(x[start + i]);
        add_block(buffer, num, whole);
    }
}

template <class T>
static void walk_as_is(const void* data, int64_t n, Sums& whole) {
    const T* x = static_cast<const T*>(data);
    for (int64_t start = 0; start < n; start += BLOCK)
        add_block(x + start, n - start < BLOCK ? n - start : BLOCK, whole);
}

// Doubles whose squares would overflow or vanish: all of it again, times a power of two.
static double walk_scaled(const double* x, int64_t n, double absmax, Sums& whole) {
    int exponent;
    std::frexp(absmax, &exponent);
    exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
    const double scale = std::ldexp(1.0, -exponent);
    double buffer[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t num = n - start < BLOCK ? n - start : BLOCK;
        for (int64_t i = 0; i < num; i++) buffer[i] = x[start + i] * scale;
        add_block(buffer, num, whole);
    }
    return std::ldexp(1.0, exponent);
}

static void dispatch(const void* data, int64_t n, int32_t type, Sums& s) {
    switch (type) {
        case F32: return walk_as_is<float>(data, n, s);
        case F64: return walk_as_is<double>(data, n, s);
        case BF16: return walk<uint16_t, float, bfloat16>(data, n, s);
        case F16: return walk<uint16_t, float, float16>(data, n, s);
        case I8: return walk<int8_t, float, widen<int8_t, float>>(data, n, s);
        case I16: return walk<int16_t, float, widen<int16_t, float>>(data, n, s);
        case I32: return walk<int32_t, double, widen<int32_t, double>>(data, n, s);
        case I64: return walk<int64_t, double, widen<int64_t, double>>(data, n, s);
        default: return walk<uint8_t, float, widen<uint8_t, float>>(data, n, s);
    }
}

static void summarize(const void* data, int64_t n, int32_t type, double* figures) {
    Sums s;
    dispatch(data, n, type, s);
    const double absmax = -s.low > s.high ? -s.low : s.high;
    double scale = 1;
    double sum = s.sum, squares = s.squares, about_mean = s.about_mean;
    if (type == F64 && s.num && (absmax > LARGE || (absmax < SMALL && absmax > 0))) {
        Sums scaled;
        scale = walk_scaled(static_cast<const double*>(data), n, absmax, scaled);
        sum = scaled.sum;
        squares = scaled.squares;
        about_mean = scaled.about_mean;
    }
    const bool has = s.num > 0;
    figures[0] = has ? sum / double(s.num) * scale : NAN_;
    figures[1] = has ? std::sqrt(about_mean / double(s.num)) * scale : NAN_;
    figures[2] = has ? s.low : NAN_;
    figures[3] = has ? s.high : NAN_;
    figures[4] = has ? std::sqrt(squares) * scale : NAN_;
    figures[5] = has ? absmax : NAN_;
    figures[6] = n ? double(s.num_zeros) / double(n) : NAN_;
    figures[7] = double(s.num_nan);
    figures[8] = double(s.num_inf);
}

}  // namespace KERNEL_ISA
}  // namespace

#endif
