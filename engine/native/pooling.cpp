// Max pooling followed by ReLU in one pass over memory, and the gradient of both in another.
//
// For images in channels_last (N, H, W, C) and windows that do not overlap, so each value is read once
// and each gradient written once. For the backward pass torch stores the index of each maximum in eight
// bytes, and the values themselves. Here that is one byte: the index within the window, or CUT where
// the ReLU outputs zero. Results equal those of torch's two operations bit for bit, except for the
// payload of a NaN.
//
// Includes itself once for each instruction set, as kernel.cpp does.

#ifndef KERNEL_ISA

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

constexpr uint8_t CUT = 255;
constexpr int64_t LEAST_FOR_THREADS = 1 << 15;  // below this many values one thread is faster
enum Type : int32_t { F32, BF16 };

struct bfloat16 {
    uint16_t bits;
};

// Windows of 2 by 2, by far the most common, have loops that a compiler unrolls.
struct Window {
    int64_t along, across;
};
struct TwoByTwo {
    static constexpr int64_t along = 2, across = 2;
};

// The images, and the windows over them. `along` and `across`: rows and columns.
struct Shape {
    int64_t num, height, width, channels;
    int64_t window_along, window_across, stride_along, stride_across;

    int64_t rows() const { return (height - window_along) / stride_along + 1; }
    int64_t columns() const { return (width - window_across) / stride_across + 1; }
};

inline float wide(float v) { return v; }
inline float wide(bfloat16 v) {
    const uint32_t bits = uint32_t(v.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void narrow(float v, float* to) { *to = v; }
inline void narrow(float v, bfloat16* to) {  // the value came from a bfloat16: no rounding
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    to->bits = uint16_t(bits >> 16);
}

// Functions for one row of windows: its first pixel, and where its results go.
template <class T>
using Forward = void (*)(const Shape&, const T* x, T* out, uint8_t* places);
template <class T>
using Backward = void (*)(const Shape&, const T* grad, const uint8_t* places, T* x_grad);

struct Isa {
    Forward<float> forward_f32;
    Forward<bfloat16> forward_bf16;
    Backward<float> backward_f32;
    Backward<bfloat16> backward_bf16;
};

}  // namespace

#define KERNEL_FILE "pooling.cpp"
#include "each_isa.h"

extern "C" int32_t glasshouse_kernel_isa();

namespace {

// Rows of windows, divided into as many shares as threads are requested. OpenMP may provide fewer
// threads (OMP_DYNAMIC, OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS). Each thread first claims the share
// with its own number, and then those that no thread has claimed.
template <class Each>
struct Rows {
    int64_t num;
    int num_shares;
    Each each;
    std::atomic<bool> claimed[MAX_THREADS];

    void take(int share) const {
        const int64_t end = num * (share + 1) / num_shares;
        for (int64_t row = num * share / num_shares; row < end; row++) each(row);
    }

    void take_from(int thread) {
        for (int turn = 0; turn < num_shares; turn++) {
            const int share = (thread + turn) % num_shares;
            if (!claimed[share].exchange(true, std::memory_order_relaxed)) take(share);
        }
    }

    static void run(void* rows) { static_cast<Rows*>(rows)->take_from(lent::thread_number()); }
};

template <class Each>
void for_rows(int64_t num, int64_t num_values, int threads, Each each) {
    threads = threads > MAX_THREADS ? MAX_THREADS : threads < 1 ? 1 : threads;
    const bool is_shared = lent::parallel && threads > 1 && num_values >= LEAST_FOR_THREADS;
    Rows<Each> rows{num, is_shared ? threads : 1, each, {}};
    if (is_shared)
        lent::parallel(Rows<Each>::run, &rows, threads, 0);
    else
        rows.take(0);
}

template <class T>
void forward(Forward<T> row_of, const Shape& s, const void* x, void* out, uint8_t* places,
             int threads) {
    const int64_t rows = s.rows(), in_row = s.width * s.channels, out_row = s.columns() * s.channels;
    for_rows(s.num * rows, s.num * s.height * in_row, threads, [=](int64_t row) {
        const int64_t first = row / rows * s.height + row % rows * s.stride_along;
        row_of(s, static_cast<const T*>(x) + first * in_row, static_cast<T*>(out) + row * out_row,
               places + row * out_row);
    });
}

// Windows without gaps between them write every gradient. Otherwise zeros are written first.
template <class T>
void backward(Backward<T> row_of, const Shape& s, const void* grad, const uint8_t* places,
              void* x_grad, int threads) {
    const int64_t rows = s.rows(), in_row = s.width * s.channels, out_row = s.columns() * s.channels;
    const bool is_tiled = s.window_along == s.stride_along && s.window_across == s.stride_across &&
                          s.height % s.stride_along == 0 && s.width % s.stride_across == 0;
    for_rows(s.num * rows, s.num * s.height * in_row, threads, [=](int64_t row) {
        const int64_t number = row % rows;
        const int64_t first = row / rows * s.height + number * s.stride_along;
        T* to = static_cast<T*>(x_grad) + first * in_row;
        if (!is_tiled) {
            const int64_t last = number + 1 == rows ? s.height - number * s.stride_along : s.stride_along;
            std::memset(static_cast<void*>(to), 0, size_t(last * in_row) * sizeof(T));
        }
        row_of(s, static_cast<const T*>(grad) + row * out_row, places + row * out_row, to);
    });
}

}  // namespace

extern "C" {

// `sizes`: images, height, width, channels, then window and stride, rows before columns. `type`: 0 is
// float32, 1 bfloat16. `isa` is lowered to what the machine supports; below zero means the best.
// Returns 0, or 1 if the arguments are not supported.
int32_t glasshouse_pool_forward(const int64_t* sizes, const void* x, void* out, uint8_t* places,
                                int32_t type, int32_t isa, int32_t threads) {
    static const int best = glasshouse_kernel_isa();
    const Isa chosen = choose(isa < 0 || isa > best ? best : isa);
    Shape s;
    std::memcpy(&s, sizes, sizeof(s));
    if (s.window_along * s.window_across >= CUT) return 1;
    if (type == F32)
        forward(chosen.forward_f32, s, x, out, places, threads);
    else if (type == BF16)
        forward(chosen.forward_bf16, s, x, out, places, threads);
    else
        return 1;
    return 0;
}

int32_t glasshouse_pool_backward(const int64_t* sizes, const void* grad, const uint8_t* places,
                                 void* x_grad, int32_t type, int32_t isa, int32_t threads) {
    static const int best = glasshouse_kernel_isa();
    const Isa chosen = choose(isa < 0 || isa > best ? best : isa);
    Shape s;
    std::memcpy(&s, sizes, sizeof(s));
    if (type == F32)
        backward(chosen.backward_f32, s, grad, places, x_grad, threads);
    else if (type == BF16)
        backward(chosen.backward_bf16, s, grad, places, x_grad, threads);
    else
        return 1;
    return 0;
}

}  // extern "C"

#else  // KERNEL_ISA: the rest is compiled once for each instruction set

namespace {
namespace KERNEL_ISA {

constexpr int F = KERNEL_BYTES / 4;  // floats in a register

typedef float floats __attribute__((vector_size(KERNEL_BYTES)));
typedef int32_t ints __attribute__((vector_size(KERNEL_BYTES)));
typedef uint32_t uints __attribute__((vector_size(KERNEL_BYTES)));
typedef float floats_at __attribute__((vector_size(KERNEL_BYTES), aligned(4), may_alias));
typedef uint16_t halves_at __attribute__((vector_size(KERNEL_BYTES / 2), aligned(2), may_alias));
typedef uint8_t bytes_at __attribute__((vector_size(KERNEL_BYTES / 4), aligned(1), may_alias));

static inline floats load(const float* x) { return *reinterpret_cast<const floats_at*>(x); }
static inline void store(const floats& v, float* to) { *reinterpret_cast<floats_at*>(to) = v; }

// Without intrinsics a compiler converts the narrower types one number at a time.
#if KERNEL_BYTES == 64
static inline floats load(const bfloat16* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}
static inline void store(const floats& v, bfloat16* to) {
    const __m512i high = _mm512_srli_epi32((__m512i)v, 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(high));
}
static inline ints load_places(const uint8_t* x) {
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
static inline void store_places(const ints& v, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v));
}
#else
typedef uint16_t halves __attribute__((vector_size(KERNEL_BYTES / 2)));
static inline floats load(const bfloat16* x) {
    return (floats)(__builtin_convertvector(*reinterpret_cast<const halves_at*>(x), uints) << 16);
}
static inline void store(const floats& v, bfloat16* to) {
    *reinterpret_cast<halves_at*>(to) = __builtin_convertvector((uints)v >> 16, halves);
}
#if KERNEL_BYTES == 32
static inline ints load_places(const uint8_t* x) {
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}
#else
static inline ints load_places(const uint8_t* x) {
    return __builtin_convertvector(*reinterpret_cast<const bytes_at*>(x), ints);
}
#endif
static inline void store_places(const ints& v, uint8_t* to) {
    const halves half = __builtin_convertvector((uints)v, halves);
    *reinterpret_cast<bytes_at*>(to) = __builtin_convertvector(half, bytes_at);
}
#endif

// The first of the largest values, as in torch: a NaN wins, the last of several NaNs. If the ReLU cuts
// all, the output is the first value of the window if that is a zero, which keeps -0; otherwise 0.
template <class W, class T>
static inline void pool_vector(const W& w, int64_t row, int64_t pixel, const T* x, T* out, uint8_t* places) {
    floats most = floats{} - float(INFINITY);
    ints place{};
    int number = 0;
    for (int64_t i = 0; i < w.along; i++)
        for (int64_t j = 0; j < w.across; j++, number++) {
            const floats v = load(x + i * row + j * pixel);
            const ints wins = (v > most) | (v != v);
            most = wins ? v : most;
            place = wins ? ints{} + number : place;
        }
    const ints is_cut = most <= 0.0f;
    const floats first = load(x);
    store(is_cut ? (first < 0.0f ? floats{} : first) : most, out);
    store_places(is_cut ? ints{} + CUT : place, places);
}

template <class W, class T>
static inline void pool_value(const W& w, int64_t row, int64_t pixel, const T* x, T* out, uint8_t* places) {
    float most = -INFINITY;
    int place = 0, number = 0;
    for (int64_t i = 0; i < w.along; i++)
        for (int64_t j = 0; j < w.across; j++, number++) {
            const float v = wide(x[i * row + j * pixel]);
            if (v > most || v != v) {
                most = v;
                place = number;
            }
        }
    const bool is_cut = most <= 0.0f;
    const float first = wide(*x);
    narrow(!is_cut ? most : first < 0.0f ? 0.0f : first, out);
    *places = is_cut ? CUT : uint8_t(place);
}

template <class W, class T>
static inline void spread_vector(const W& w, int64_t row, int64_t pixel, const T* grad, const uint8_t* places, T* x_grad) {
    const floats g = load(grad) + 0.0f;  // torch adds it to a zero: -0 becomes 0
    const ints place = load_places(places);
    int number = 0;
    for (int64_t i = 0; i < w.along; i++)
        for (int64_t j = 0; j < w.across; j++, number++)
            store(place == number ? g : floats{}, x_grad + i * row + j * pixel);
}

template <class W, class T>
static inline void spread_value(const W& w, int64_t row, int64_t pixel, const T* grad, const uint8_t* places, T* x_grad) {
    int number = 0;
    for (int64_t i = 0; i < w.along; i++)
        for (int64_t j = 0; j < w.across; j++, number++)
            narrow(*places == number ? wide(*grad) + 0.0f : 0.0f, x_grad + i * row + j * pixel);
}

// Channels by registers. The last register starts early enough to be full, and repeats some channels.
template <class Vector, class Value>
static inline void over_channels(int64_t channels, Vector vector, Value value) {
    if (channels < F) {
        for (int64_t c = 0; c < channels; c++) value(c);
        return;
    }
    int64_t c = 0;
    for (; c + F <= channels; c += F) vector(c);
    if (c < channels) vector(channels - F);
}

template <class W, class T>
static inline void forward_windows(const W& w, const Shape& s, const T* x, T* out, uint8_t* places) {
    const int64_t pixel = s.channels, row = s.width * pixel, columns = s.columns();
    for (int64_t column = 0; column < columns; column++) {
        over_channels(
            pixel, [&](int64_t c) { pool_vector(w, row, pixel, x + c, out + c, places + c); },
            [&](int64_t c) { pool_value(w, row, pixel, x + c, out + c, places + c); });
        x += s.stride_across * pixel;
        out += pixel;
        places += pixel;
    }
}

template <class T>
static void forward_row(const Shape& s, const T* x, T* out, uint8_t* places) {
    if (s.window_along == 2 && s.window_across == 2) return forward_windows(TwoByTwo(), s, x, out, places);
    forward_windows(Window{s.window_along, s.window_across}, s, x, out, places);
}

template <class W, class T>
static inline void backward_windows(const W& w, const Shape& s, const T* grad, const uint8_t* places,
                                    T* x_grad) {
    const int64_t pixel = s.channels, row = s.width * pixel, columns = s.columns();
    for (int64_t column = 0; column < columns; column++) {
        over_channels(
            pixel, [&](int64_t c) { spread_vector(w, row, pixel, grad + c, places + c, x_grad + c); },
            [&](int64_t c) { spread_value(w, row, pixel, grad + c, places + c, x_grad + c); });
        grad += pixel;
        places += pixel;
        x_grad += s.stride_across * pixel;
    }
}

template <class T>
static void backward_row(const Shape& s, const T* grad, const uint8_t* places, T* x_grad) {
    if (s.window_along == 2 && s.window_across == 2)
        return backward_windows(TwoByTwo(), s, grad, places, x_grad);
    backward_windows(Window{s.window_along, s.window_across}, s, grad, places, x_grad);
}

constexpr Isa ISA = {forward_row<float>, forward_row<bfloat16>, backward_row<float>,
                     backward_row<bfloat16>};

}  // namespace KERNEL_ISA
}  // namespace

#endif
