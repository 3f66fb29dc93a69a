// The statistics of a tensor in one pass over memory: mean, std, min, max, l2, absmax, zeros, nan, inf.
//
// Plain C interface, no torch: native_kernel.py calls it with ctypes. A tensor is read in blocks that
// fit the L1 cache. A block whose values are all finite takes one sweep. If its sum of squares is not
// finite, the block's finite values are collected and swept again. If the mean is much larger than the
// deviation, the block is swept a second time about its mean. Blocks are merged in double by Chan's
// formula. Narrow types are widened a block at a time into a buffer that stays in the cache. If a
// histogram is requested, the block is also counted: glasshouse/histogram_bins.py defines the bins.
//
// Tensors are divided into chunks of a fixed size, which any thread may take and which are merged
// in order, so the statistics do not depend on the number of threads. The threads are torch's.
//
// On x86-64 the file includes itself once for each instruction set; one is selected at run time.

#ifndef KERNEL_ISA

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "threads.h"

namespace {

enum Type : int32_t { F32, F64, BF16, F16, I8, I16, I32, I64, U8, BOOL, NUM_TYPES };

constexpr int64_t BLOCK = 2048;
constexpr int64_t CHUNK = 8 * BLOCK;  // what a thread takes at a time
constexpr int64_t AHEAD = 1024;       // values to prefetch: a layer's output is not in the L1 or L2 cache
constexpr int NUM_FIGURES = 9;
constexpr int NUM_BINS = 4096;
constexpr int NUM_TABLES = 4;
#ifdef KERNEL_MOST_PENDING
constexpr int64_t MOST_PENDING = KERNEL_MOST_PENDING;  // for a test, which has less memory
#else
constexpr int64_t MOST_PENDING = int64_t(1) << 30;
#endif
constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double NAN_ = std::numeric_limits<double>::quiet_NaN();
constexpr double CANCELS = 1e-6;           // var / mean square below which a block is swept again
constexpr double LARGE = 1e140, SMALL = 1e-140;  // squares of values beyond these need a scale

// Statistics of a block, or of the blocks so far. All but the counts are of the finite values.
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

// The bins counted by one thread. Consecutive values go to different tables: otherwise equal values,
// mostly zeros, would have to wait for each other's increments.
struct Counter {
    uint32_t tables[NUM_TABLES][NUM_BINS];
    uint64_t totals[NUM_BINS];
    int64_t pending;  // number of values in the tables, which must not overflow
    bool has_totals;

    void add_tables(uint64_t* to) {
        for (int i = 0; i < NUM_BINS; i++)
            to[i] += uint64_t(tables[0][i]) + tables[1][i] + tables[2][i] + tables[3][i];
        std::memset(tables, 0, sizeof(tables));
        pending = 0;
    }

    void settle() {
        add_tables(totals);
        has_totals = true;
    }
};

inline uint32_t bits_of(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}

constexpr uint32_t NEGATIVE_ZERO = 0x80000000u;

inline uint16_t bin_of(float v) {
    const uint32_t bits = bits_of(v);
    return bits == NEGATIVE_ZERO ? 0 : uint16_t(bits >> 20);
}

// A finite double that rounds to infinity as a float goes to the last finite bin.
inline uint16_t bin_of(double v) {
    const uint32_t bits = bits_of(float(v));
    const bool is_beyond = (bits & 0x7fffffffu) == 0x7f800000u && v - v == 0;
    return bits == NEGATIVE_ZERO ? 0 : uint16_t((bits >> 20) - (is_beyond ? 1 : 0));
}

// What the values of a tensor are added to.
struct Tally {
    Sums& whole;
    Counter* counter;  // or null
};

struct Isa {  // the functions that are compiled for each instruction set
    void (*add)(const void* data, int64_t start, int64_t n, int32_t type, const Tally& tally);
    void (*finish)(const void* data, int64_t n, int32_t type, const Sums& s, double* figures);
};

}  // namespace

#define KERNEL_FILE "kernel.cpp"
#include "each_isa.h"

namespace {

// The best instruction set of this machine: 0 baseline, 1 AVX2, 2 AVX-512.
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

constexpr int64_t LEAST_FOR_THREADS = 4 * CHUNK;

struct alignas(64) Claimed {
    std::atomic<int64_t> next;
};

// Chunks of several tensors. Each thread starts with its share, as torch divides work, and then
// helps with the shares of the others.
struct Work {
    Isa isa;
    int64_t count;
    const void* const* data;
    const int64_t* sizes;
    const int32_t* types;
    const int64_t* firsts;  // the index of each tensor's first chunk, and the number of all chunks
    Sums* sums;             // of each chunk
    Counter* counters;      // of each thread, or null
    int num_shares;
    Claimed claimed[MAX_THREADS];

    int64_t share(int number) const { return firsts[count] * number / num_shares; }

    int64_t tensor_of(int64_t chunk) const {
        int64_t low = 0, high = count;  // find the last tensor whose first chunk is not after this one
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (firsts[middle] <= chunk ? low : high) = middle;
        }
        return low;
    }

    void take(int thread) {
        Counter* counter = counters ? counters + thread : nullptr;
        for (int turn = 0; turn < num_shares; turn++) {
            const int number = (thread + turn) % num_shares;
            const int64_t end = share(number + 1);
            int64_t chunk;
            while ((chunk = claimed[number].next.fetch_add(1, std::memory_order_relaxed)) < end) {
                const int64_t tensor = tensor_of(chunk);
                const int64_t start = (chunk - firsts[tensor]) * CHUNK;
                const int64_t left = sizes[tensor] - start;
                isa.add(data[tensor], start, left < CHUNK ? left : CHUNK, types[tensor],
                        {sums[chunk], counter});
            }
        }
    }

    static void run(void* work) { static_cast<Work*>(work)->take(lent::thread_number()); }
};

// Memory of one call, freed when it returns.
template <class T>
struct Memory {
    T* const at;
    explicit Memory(int64_t num) : at(static_cast<T*>(std::calloc(num ? num : 1, sizeof(T)))) {}
    ~Memory() { std::free(at); }
};

int64_t num_chunks(int64_t n) { return n / CHUNK + (n % CHUNK ? 1 : 0); }

Sums merged(const Sums* sums, int64_t num) {
    Sums whole;
    for (int64_t i = 0; i < num; i++) whole.add(sums[i]);
    return whole;
}

bool summarize(Isa isa, int64_t count, const void* const* data, const int64_t* sizes,
               const int32_t* types, double* figures, Counter* counters, int threads) {
    const Memory<int64_t> firsts(count + 1);
    if (!firsts.at) return false;
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        firsts.at[i + 1] = firsts.at[i] + num_chunks(sizes[i]);
        total += sizes[i];
    }
    const int64_t chunks = firsts.at[count];
    const Memory<Sums> sums(chunks);
    if (!sums.at) return false;
    for (int64_t i = 0; i < chunks; i++) sums.at[i] = Sums();
    const bool is_shared = lent::parallel && threads > 1 && total >= LEAST_FOR_THREADS;
    Work work{isa, count, data, sizes, types, firsts.at, sums.at, counters, is_shared ? threads : 1, {}};
    for (int i = 0; i < work.num_shares; i++) work.claimed[i].next = work.share(i);
    if (is_shared)
        lent::parallel(Work::run, &work, threads, 0);
    else
        work.take(0);
    for (int64_t i = 0; i < count; i++, figures += NUM_FIGURES) {
        const Sums whole = merged(sums.at + firsts.at[i], firsts.at[i + 1] - firsts.at[i]);
        isa.finish(data[i], sizes[i], types[i], whole, figures);
    }
    return true;
}

// The bins that are not empty, in order of their index. Resets the counters.
int64_t collect(Counter* counters, int num, int32_t* bins, int64_t* counts) {
    uint64_t totals[NUM_BINS] = {};
    for (int i = 0; i < num; i++) {
        Counter& counter = counters[i];
        if (counter.pending) counter.add_tables(totals);
        if (!counter.has_totals) continue;
        for (int j = 0; j < NUM_BINS; j++) totals[j] += counter.totals[j];
        std::memset(counter.totals, 0, sizeof(counter.totals));
        counter.has_totals = false;
    }
    int64_t found = 0;
    for (int32_t octave = 0; octave < NUM_BINS; octave += 8) {
        if ((octave & 0x7ff) == 0x7f8) continue;  // NaN and the infinities
        uint64_t any = 0;
        for (int32_t j = octave; j < octave + 8; j++) any |= totals[j];
        for (int32_t j = octave; any && j < octave + 8; j++) {
            if (!totals[j]) continue;
            bins[found] = j;
            counts[found++] = int64_t(totals[j]);
        }
    }
    return found;
}

}  // namespace

namespace lent {
Parallel parallel = nullptr;
ThreadNumber thread_number = nullptr;
}  // namespace lent

#ifndef KERNEL_SOURCE
#define KERNEL_SOURCE 0
#endif

extern "C" {

// Identifies the source that this library was built from.
uint64_t glasshouse_kernel_source() { return KERNEL_SOURCE; }

int32_t glasshouse_kernel_isa() { return best_isa(); }

// Sets the threads to use, those of an OpenMP runtime: its GOMP_parallel and omp_get_thread_num.
void glasshouse_kernel_threads(Parallel run, ThreadNumber number) {
    lent::parallel = run;
    lent::thread_number = number;
}

// The statistics of `count` tensors, nine for each. If `bins` is not null, also the bins that are not
// empty and their counts, one tensor after another, with `num_bins` of each. `isa` is lowered to what
// the machine supports; below zero means the best. Returns 0, 1 for an unknown type, or 2 if memory
// runs out.
int32_t glasshouse_summarize(int64_t count, const void* const* data, const int64_t* sizes,
                             const int32_t* types, double* figures, int32_t* bins, int64_t* counts,
                             int64_t* num_bins, int32_t isa, int32_t threads) {
    static const int best = best_isa();
    const Isa chosen = choose(isa < 0 || isa > best ? best : isa);
    threads = threads > MAX_THREADS ? MAX_THREADS : threads < 1 ? 1 : threads;
    for (int64_t i = 0; i < count; i++)
        if (types[i] < 0 || types[i] >= NUM_TYPES) return 1;
    if (!bins) return summarize(chosen, count, data, sizes, types, figures, nullptr, threads) ? 0 : 2;
    int64_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = sizes[i] > largest ? sizes[i] : largest;
    if (largest < LEAST_FOR_THREADS) threads = 1;
    const Memory<Counter> counters(threads);
    if (!counters.at) return 2;
    for (int64_t i = 0; i < count; i++) {
        if (!summarize(chosen, 1, data + i, sizes + i, types + i, figures + i * NUM_FIGURES,
                       counters.at, threads))
            return 2;
        num_bins[i] = collect(counters.at, threads, bins, counts);
        bins += num_bins[i];
        counts += num_bins[i];
    }
    return 0;
}

// The statistics of one tensor: hooks call this for one tensor at a time.
int32_t glasshouse_summarize_one(const void* data, int64_t size, int32_t type, double* figures,
                                 int32_t threads) {
    return glasshouse_summarize(1, &data, &size, &type, figures, nullptr, nullptr, nullptr, -1,
                                threads);
}

}  // extern "C"

#else  // KERNEL_ISA: the rest is compiled once for each instruction set

namespace {
namespace KERNEL_ISA {

constexpr int F = KERNEL_BYTES / 4, D = KERNEL_BYTES / 8;  // floats, doubles in a register

typedef float floats __attribute__((vector_size(KERNEL_BYTES)));
typedef int32_t ints __attribute__((vector_size(KERNEL_BYTES)));
typedef double doubles __attribute__((vector_size(KERNEL_BYTES)));
typedef int64_t longs __attribute__((vector_size(KERNEL_BYTES)));

// Vectors are loaded through these types, because a tensor may start at any address.
typedef float floats_at __attribute__((vector_size(KERNEL_BYTES), aligned(4), may_alias));
typedef double doubles_at __attribute__((vector_size(KERNEL_BYTES), aligned(8), may_alias));
template <class T>
struct Narrow;  // as many values as fill a register when widened to double
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

// Intrinsics where a compiler would widen half a register at a time, or count in another register.
#if KERNEL_BYTES == 64
static inline doubles load_doubles(const float* x) {
    return (doubles)_mm512_cvtps_pd(_mm256_loadu_ps(x));
}
static inline void count_zeros(ints& num, floats v) {
    const __mmask16 found = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __m512i before = (__m512i)num;
    num = (ints)_mm512_mask_add_epi32(before, found, before, _mm512_set1_epi32(1));
}
#else
#if KERNEL_BYTES == 32
static inline doubles load_doubles(const float* x) {
    return (doubles)_mm256_cvtps_pd(_mm_loadu_ps(x));
}
#endif
static inline void count_zeros(ints& num, floats v) { num -= (ints)(v == 0.0f); }
#endif

// Joins the halves of a register repeatedly until one number remains.
template <class T, class V, class Join>
static inline T folded(const V& v, Join join) {
    T parts[sizeof(V) / sizeof(T)];
    std::memcpy(parts, &v, sizeof(V));
    for (unsigned half = sizeof(V) / sizeof(T) / 2; half; half /= 2)
        for (unsigned i = 0; i < half; i++) parts[i] = join(parts[i], parts[i + half]);
    return parts[0];
}

static inline double total(const doubles& v) {
    return folded<double>(v, [](double a, double b) { return a + b; });
}
static inline int64_t total(const ints& v) {
    return folded<int32_t>(v, [](int32_t a, int32_t b) { return a + b; });
}
static inline int64_t total(const longs& v) {
    return folded<int64_t>(v, [](int64_t a, int64_t b) { return a + b; });
}

template <class T, class V>
static inline void extremes(const V& low, const V& high, Sums& s) {
    s.low = folded<T>(low, [](T a, T b) { return a < b ? a : b; });
    s.high = folded<T>(high, [](T a, T b) { return a > b ? a : b; });
}

static inline void sweep_tail(double v, Sums& s) {
    s.sum += v;
    s.squares += v * v;
    s.low = v < s.low ? v : s.low;
    s.high = v > s.high ? v : s.high;
    s.num_zeros += v == 0;
}

// One sweep, correct if every value is finite; otherwise its sum of squares is not finite. The sums
// are kept in two halves of a register each.
static void sweep(const float* x, int64_t n, Sums& s) {
    floats low = floats{} + float(INF), high = -low;
    doubles sum0{}, sum1{}, squares0{}, squares1{};
    ints zeros{};
    int64_t i = 0;
    for (; i + F <= n; i += F) {
        const floats v = *reinterpret_cast<const floats_at*>(x + i);
        low = v < low ? v : low;
        high = v > high ? v : high;
        __builtin_prefetch(x + i + AHEAD);
        count_zeros(zeros, v);
        const doubles a = load_doubles(x + i), b = load_doubles(x + i + D);
        sum0 += a;
        sum1 += b;
        squares0 += a * a;
        squares1 += b * b;
    }
    s.num = n;
    s.sum = total(sum0 + sum1);
    s.squares = total(squares0 + squares1);
    s.num_zeros = total(zeros);
    extremes<float>(low, high, s);
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
    s.num_zeros = total(zeros);
    extremes<double>(low, high, s);
    for (; i < n; i++) sweep_tail(x[i], s);
}

// The squared deviations from the block's mean, corrected for the rounding error of the mean.
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

// Moves the finite values to the front of `kept`, and counts the others.
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
static void count_block(const T* x, int64_t n, Counter& counter) {
    uint16_t bins[BLOCK];
    for (int64_t i = 0; i < n; i++) bins[i] = bin_of(x[i]);
    if (counter.pending > MOST_PENDING) counter.settle();
    counter.pending += n;
    auto& tables = counter.tables;
    int64_t i = 0;
    for (; i + NUM_TABLES <= n; i += NUM_TABLES) {
        tables[0][bins[i]]++;
        tables[1][bins[i + 1]]++;
        tables[2][bins[i + 2]]++;
        tables[3][bins[i + 3]]++;
    }
    for (; i < n; i++) tables[0][bins[i]]++;
}

template <class T>
static void add_block(const T* x, int64_t n, Sums& whole, Counter* counter) {
    if (counter) count_block(x, n, *counter);
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
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;  // the exponent is 112 too small
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

// Narrow values are widened.
template <class From, class To, To (*wide)(From)>
static void walk(const void* data, int64_t start, int64_t n, const Tally& tally) {
    const From* x = static_cast<const From*>(data) + start;
    To buffer[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t num = n - at < BLOCK ? n - at : BLOCK;
        for (int64_t i = 0; i < num; i++) buffer[i] = wide(x[at + i]);
        add_block(buffer, num, tally.whole, tally.counter);
    }
}

template <class T>
static void walk_as_is(const void* data, int64_t start, int64_t n, const Tally& tally) {
    const T* x = static_cast<const T*>(data) + start;
    for (int64_t at = 0; at < n; at += BLOCK)
        add_block(x + at, n - at < BLOCK ? n - at : BLOCK, tally.whole, tally.counter);
}

// Doubles whose squares would overflow or underflow: sweep again, multiplied by a power of two.
static double walk_scaled(const double* x, int64_t n, double absmax, Sums& whole) {
    int exponent;
    std::frexp(absmax, &exponent);
    exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
    const double scale = std::ldexp(1.0, -exponent);
    double buffer[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t num = n - start < BLOCK ? n - start : BLOCK;
        for (int64_t i = 0; i < num; i++) buffer[i] = x[start + i] * scale;
        add_block(buffer, num, whole, nullptr);
    }
    return std::ldexp(1.0, exponent);
}

// Adds `n` values of a tensor, starting at index `start`.
static void add(const void* data, int64_t start, int64_t n, int32_t type, const Tally& tally) {
    switch (type) {
        case F32: return walk_as_is<float>(data, start, n, tally);
        case F64: return walk_as_is<double>(data, start, n, tally);
        case BF16: return walk<uint16_t, float, bfloat16>(data, start, n, tally);
        case F16: return walk<uint16_t, float, float16>(data, start, n, tally);
        case I8: return walk<int8_t, float, widen<int8_t, float>>(data, start, n, tally);
        case I16: return walk<int16_t, float, widen<int16_t, float>>(data, start, n, tally);
        case I32: return walk<int32_t, double, widen<int32_t, double>>(data, start, n, tally);
        case I64: return walk<int64_t, double, widen<int64_t, double>>(data, start, n, tally);
        default: return walk<uint8_t, float, widen<uint8_t, float>>(data, start, n, tally);
    }
}

static void finish(const void* data, int64_t n, int32_t type, const Sums& s, double* figures) {
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

constexpr Isa ISA = {add, finish};

}  // namespace KERNEL_ISA
}  // namespace

#endif
