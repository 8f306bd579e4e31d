// What a CPU computes for 16-bit models: products with matrices in their own layouts, and what lies between them.
//
// C symbols, neither torch nor Python: `library.py` compiles this file, calls it, and says what each symbol takes.
// Every sum has one order, whatever the number of rows, of threads and of others at work: a row's result is its own.
// Vectors are the compiler's, as wide as the CPU's; instructions are named only where no compiler finds them.
//
// Legend: N outputs, K inputs of a matrix, M rows, T tokens, D model dim, H head dim.

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#if LANES == 16 && defined(__AVX512BF16__)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif
#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
#if LANES == 16 && defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
#define UNROLL _Pragma("GCC unroll 16")
#define SYMBOL extern "C" __attribute__((visibility("default")))

namespace {

constexpr int PANEL = 16;               // outputs that lie side by side
constexpr int PARTS = PANEL / LANES;    // vectors of them
constexpr int WIDTH = 4 * LANES;        // bytes of a vector
constexpr int STEP = 4 * PANEL;         // bytes of a panel that are read at once

typedef float Floats __attribute__((vector_size(WIDTH)));
typedef int32_t Ints __attribute__((vector_size(WIDTH)));
typedef uint32_t Words __attribute__((vector_size(WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(WIDTH / 2)));

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof(V));
}

inline Floats spread(float x) { return Floats{} + x; }
inline Ints spread(int32_t x) { return Ints{} + x; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if LANES == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float sum(Floats v) {
    float s[LANES];
    store(s, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

#if LANES == 16
inline float total(Floats v) { return _mm512_reduce_add_ps((__m512)v); }
#else
inline float total(Floats v) { return sum(v); }
#endif

inline float largest(Floats v) {
    float s[LANES];
    store(s, v);
    return *std::max_element(s, s + LANES);
}

// Types of 16 bits

struct Bf16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

inline Floats widened(Words bits) { return (Floats)(bits << 16); }

inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    float value;
    uint32_t bits = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112u << 23);
    std::memcpy(&value, &bits, 4);
    if (rest < 0x400) value = (float)rest * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t float_to_half(float value) {
    uint32_t bits, sign;
    std::memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        float small;
        std::memcpy(&small, &bits, 4);
        return sign | (uint16_t)std::nearbyint(small * 0x1p24f);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - (112u << 23)) >> 13);
}

inline Floats load16(const Bf16* from) { return widened(__builtin_convertvector(load<Shorts>(from), Words)); }

inline Floats load16(const Half* from) {
#if LANES == 16
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif LANES == 8 && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(from[i].bits);
    return v;
#endif
}

inline Floats load16(const float* from) { return load<Floats>(from); }

inline void store16(Bf16* to, Floats v) {
    Words bits = (Words)v;
    Words rounded = bits + 0x7fff + (bits >> 16 & 1);
    rounded = (v == v) ? rounded : bits | 0x400000;
    store(to, __builtin_convertvector(rounded >> 16, Shorts));
}

inline void store16(Half* to, Floats v) {
#if LANES == 16
    store(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8 && defined(__F16C__)
    store(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) to[i].bits = float_to_half(v[i]);
#endif
}

template <class T>
inline Floats rounded(Floats v) {
    T parts[LANES];
    store16(parts, v);
    return load16(parts);
}

template <class T>
inline float to_float(T x) {
    T parts[LANES] = {x};
    return load16(parts)[0];
}

// e^x, within 2 units of the last place; 0 below -87
inline Floats exponential(Floats x) {
    Floats bounded = larger(x, spread(-87.0f));
    bounded = bounded < 88.0f ? bounded : spread(88.0f);
    Floats n = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;
    Floats r = fma(n, spread(-0.693359375f), bounded);
    r = fma(n, spread(2.12194440e-4f), r);
    Floats p = spread(1.9875691500e-4f);
    p = fma(p, r, spread(1.3981999507e-3f));
    p = fma(p, r, spread(8.3334519073e-3f));
    p = fma(p, r, spread(4.1665795894e-2f));
    p = fma(p, r, spread(1.6666665459e-1f));
    p = fma(p, r, spread(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    Ints power = __builtin_convertvector(n, Ints) + 127;
    Floats y = p * (Floats)(power << 23);
    return x < -87.0f ? spread(0.0f) : y;
}

// Threads, as many as torch has.  Whoever calls takes parts of the work like the others and waits for none that has
// not begun, so that a core which is somebody else's for a while delays nobody; who has nothing to do sleeps soon.

typedef int (*Count)();
const Count torch_threads = (Count)dlsym(RTLD_DEFAULT, "omp_get_max_threads");
constexpr int MOST_THREADS = 256;
constexpr auto SPIN = std::chrono::microseconds(60);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Pool {
    typedef void (*Work)(const void*, int64_t);
    std::atomic<Work> work{nullptr};
    std::atomic<const void*> task{nullptr};
    std::atomic<int64_t> num{0}, done{0};
    std::atomic<int> helpers{0};            // that may take part
    std::atomic<uint64_t> next{0};          // the job's number above, and the next part of it
    std::atomic<uint32_t> job{0};
    std::atomic<int> asleep{0};
    std::atomic<bool> busy{false};
    std::mutex lock;
    std::condition_variable awake;
    int started = 0;
    int cpus[MOST_THREADS], num_cpus = 0;   // one for each thread, if it is known

    void take_parts(uint32_t number) {
        const Work todo = work.load(std::memory_order_acquire);
        const void* data = task.load(std::memory_order_acquire);
        const int64_t parts = num.load(std::memory_order_acquire);
        uint64_t at = next.load(std::memory_order_acquire);
        while ((uint32_t)(at >> 32) == number && (int64_t)(uint32_t)at < parts) {
            // What was read above is this job's, or `next` has been closed before it was written: then this fails.
            if (!next.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel)) continue;
            todo(data, (int64_t)(uint32_t)at);
            done.fetch_add(1, std::memory_order_release);
            at = next.load(std::memory_order_acquire);
        }
    }

    void help(int index) {
#if defined(__linux__)
        if (index + 1 < num_cpus) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cpus[index + 1], &set);
            pthread_setaffinity_np(pthread_self(), sizeof set, &set);
        }
#endif
        uint32_t seen = 0;
        for (;;) {
            auto until = std::chrono::steady_clock::now() + SPIN;
            uint32_t number;
            while ((number = job.load(std::memory_order_acquire)) == seen) {
                for (int i = 0; i < 8; i++) pause();
                if (std::chrono::steady_clock::now() < until) continue;
                std::unique_lock<std::mutex> held(lock);
                asleep.fetch_add(1);
                awake.wait(held, [&] { return job.load() != seen; });
                asleep.fetch_sub(1);
            }
            seen = number;
            if (index < helpers.load(std::memory_order_relaxed)) take_parts(number);
        }
    }

    void run(Work todo, const void* data, int64_t parts, int threads) {
        for (; started < threads - 1; started++) std::thread([this, i = started] { help(i); }).detach();
        const uint32_t number = job.load(std::memory_order_relaxed) + 1;
        // Closed first, so that nobody who is late for the last job takes a part of it by this one's numbers.
        next.exchange((uint64_t)number << 32 | 0xffffffffu);
        work.store(todo, std::memory_order_release);
        task.store(data, std::memory_order_release);
        num.store(parts, std::memory_order_release);
        done.store(0, std::memory_order_relaxed);
        helpers.store(threads - 1, std::memory_order_relaxed);
        next.store((uint64_t)number << 32, std::memory_order_release);
        job.store(number);
        if (asleep.load()) {
            std::lock_guard<std::mutex> held(lock);
            awake.notify_all();
        }
        take_parts(number);
        for (int spins = 0; done.load(std::memory_order_acquire) < parts; spins++)
            spins < 2000 ? pause() : (void)sched_yield();
    }
};

Pool* pool = new Pool;  // never ends: its threads do not
const int at_fork = pthread_atfork(nullptr, nullptr, [] {
    Pool* fresh = new Pool;  // a child has none of the threads
    std::copy_n(pool->cpus, pool->num_cpus, fresh->cpus);
    fresh->num_cpus = pool->num_cpus;
    pool = fresh;
});

// task(i) for all i < num, in any order
template <class Task>
void for_all(int64_t num, const Task& task) {
    const int threads = torch_threads ? std::min(torch_threads(), MOST_THREADS) : std::max(1, pool->num_cpus);
    if (num > 1 && threads > 1 && !pool->busy.exchange(true, std::memory_order_acquire)) {
        pool->run([](const void* data, int64_t i) { (*(const Task*)data)(i); }, &task, num, threads);
        pool->busy.store(false, std::memory_order_release);
        return;
    }
    for (int64_t i = 0; i < num; i++) task(i);
}

// Memory that a thread uses again at its next call
template <int WHICH>
char* scratch(size_t num_bytes) {
    struct Room {
        char* at = nullptr;
        size_t size = 0;
        ~Room() { std::free(at); }
    };
    static thread_local Room room;
    if (room.size < num_bytes) {
        std::free(room.at);
        room.size = (num_bytes + 4095) / 4096 * 4096;
        room.at = (char*)std::aligned_alloc(4096, room.size);
    }
    return room.at;
}

// Matrices

enum Code : int32_t { BF16 = 0, BYTES = 1, NIBBLES = 2, MAPPED = 3, TABLE = 4, E4M3 = 5, E5M2 = 6 };
enum Type : int32_t { IS_BF16 = 0, IS_HALF = 1 };
enum Gate : int32_t { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4 };

}  // namespace

// act(gate) * up; with a limit min(gate, limit) * sigmoid(alpha * gate) * (1 + clamp(up))
struct Gating {
    int32_t act = NONE;
    float limit = 0, alpha = 1;  // limit 0: none
};

// W [N, K] in panels of 16 outputs: a step of 64 bytes has, of each, 2 inputs of 16 bits, 4 of 8 or 8 of 4 bits.
struct Matrix {
    const uint8_t* words;   // [N / 16, steps, 16, 4]; of 4 bits inputs 0 .. 3 in the low halves, 4 .. 7 above
    const uint16_t* scale;  // half [N / 16, groups, 16], or none; times scale_unit
    const uint16_t* offset; // half, as scale, or none: what is subtracted from all weights; times offset_unit
    const float* rows;      // [N / 16, 16] a scale for each output, or none
    const uint16_t* bias;   // [N], of the activations' type, or none
    const uint8_t* table;   // what 4 bits stand for: MAPPED [16] bytes; TABLE [2, 16], low and high ones, plus 128
    int64_t num_out, num_in;  // of whole panels and groups
    int64_t num_used;         // inputs that x has; behind them are zeros
    int64_t stored;           // outputs that y has
    int64_t group;            // inputs
    float scale_unit, offset_unit;
    int32_t code, middle, type;
    int32_t gated;  // panels are of gates and of what these open, by turns
};

namespace {

// Activations as integers of 16 bits, of each row's largest.  With VNNI upper and lower bytes lie apart.
constexpr float LARGEST = 127 * 256;

struct Rounded {
    int64_t row_bytes, num_groups;
    char* high;    // [M, K and some more] bytes; without VNNI shorts, of four inputs 0, 2, 1, 3
    char* low;     // the same
    int32_t* sums; // [M, groups]
    float* steps;  // [M]

    // Rows whose distance is no power of two share fewer lines of a cache.
    Rounded(int64_t rows, int64_t num_in, int64_t groups)
        : row_bytes(num_in * (HAS_VNNI ? 1 : 2) + 64), num_groups(groups) {
        high = scratch<0>(rows * (2 * row_bytes + 4 * groups + 4));
        low = high + (HAS_VNNI ? rows * row_bytes : 0);
        sums = (int32_t*)(high + 2 * rows * row_bytes);
        steps = (float*)(sums + rows * groups);
    }
};

template <class T>
void round_row(const T* x, int64_t row, int64_t num_used, int64_t group, const Rounded& out) {
    const int64_t whole = num_used / LANES * LANES;
    Floats most = spread(1e-30f);
    T tail[LANES] = {};
    std::copy(x + whole, x + num_used, tail);
    for (int64_t k = 0; k < whole; k += LANES) {
        Floats v = load16(x + k);
        most = larger(most, larger(v, -v));
    }
    if (whole < num_used) {
        Floats v = load16(tail);
        most = larger(most, larger(v, -v));
    }
    const float largest_ = largest(most), inverse = LARGEST / largest_;
    out.steps[row] = largest_ / LARGEST;
    char *high = out.high + row * out.row_bytes, *low = out.low + row * out.row_bytes;
    for (int64_t g = 0; g < out.num_groups; g++) {
        Ints sums = {};
        for (int64_t k = g * group; k < (g + 1) * group; k += LANES) {
            Floats v = k < whole ? load16(x + k) : k < num_used ? load16(tail) : Floats{};
            Ints q = (Ints)(v * inverse + 12582912.0f) - 0x4B400000;
            sums += q;
#if HAS_VNNI
            Ints upper = (q + 128) >> 8, lower = q - (upper << 8);
            typedef int8_t Bytes __attribute__((vector_size(LANES)));
            store(high + k, __builtin_convertvector(upper, Bytes));
            store(low + k, __builtin_convertvector(lower, Bytes));
#else
            int16_t shorts[LANES];
            for (int i = 0; i < LANES; i++) shorts[i & ~3 | (i & 1) << 1 | (i & 2) >> 1] = (int16_t)q[i];
            std::memcpy(high + 2 * k, shorts, sizeof shorts);
#endif
        }
        int32_t parts[LANES], all = 0;
        store(parts, sums);
        for (int i = 0; i < LANES; i++) all += parts[i];
        out.sums[row * out.num_groups + g] = all;
    }
    (void)low;
}

// Sums of products of codes with both bytes of activations
struct Sums {
    Ints a = {}, b = {};

    // w: of each output four codes of inputs 4 * k4 ..
    inline void add(Words w, const char* high, const char* low, int64_t k4) {
#if HAS_VNNI
        const Ints upper = spread(load<int32_t>(high + 4 * k4)), lower = spread(load<int32_t>(low + 4 * k4));
#if LANES == 16
        a = (Ints)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, (__m512i)upper);
        b = (Ints)_mm512_dpbusd_epi32((__m512i)b, (__m512i)w, (__m512i)lower);
#else
        a = (Ints)_mm256_dpbusd_avx_epi32((__m256i)a, (__m256i)w, (__m256i)upper);
        b = (Ints)_mm256_dpbusd_avx_epi32((__m256i)b, (__m256i)w, (__m256i)lower);
#endif
#else
        const Words even = w & 0x00ff00ff, odd = w >> 8 & 0x00ff00ff;
        const char* x = high + 8 * k4;
#if LANES == 16
        a += (Ints)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(load<int32_t>(x)));
        b += (Ints)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(load<int32_t>(x + 4)));
#elif LANES == 8
        a += (Ints)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(load<int32_t>(x)));
        b += (Ints)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(load<int32_t>(x + 4)));
#else
        const int16_t* s = (const int16_t*)x;
        a += (Ints)(even & 0xffff) * (int32_t)s[0] + (Ints)(even >> 16) * (int32_t)s[1];
        b += (Ints)(odd & 0xffff) * (int32_t)s[2] + (Ints)(odd >> 16) * (int32_t)s[3];
#endif
        (void)low;
#endif
    }

    inline Ints all() const { return HAS_VNNI ? (a << 8) + b : a + b; }
};

inline Words in_table(const uint8_t* table, Words nibbles) {
#if LANES == 16
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)nibbles);
#elif LANES == 8
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)nibbles);
#else
    uint8_t bytes[WIDTH];
    store(bytes, nibbles);
    for (auto& byte : bytes) byte = table[byte];
    return load<Words>(bytes);
#endif
}

// M rows with V vectors of outputs, of integers
template <int M, int V, int CODE>
struct IntegerTile {
    static void run(const Matrix& m, const Rounded& x, int64_t row, int64_t panel, Floats (&out)[M][V]) {
        constexpr int INPUTS = CODE == BYTES ? 4 : 8;
        constexpr int PLANES = CODE == TABLE ? 2 : 1;
        const int64_t steps = m.group / INPUTS, panel_bytes = m.num_in / INPUTS * STEP;
        const uint8_t* words = m.words + panel * panel_bytes;
        const char *high[M], *low[M];
        UNROLL for (int i = 0; i < M; i++) {
            high[i] = x.high + (row + i) * x.row_bytes;
            low[i] = x.low + (row + i) * x.row_bytes;
            UNROLL for (int v = 0; v < V; v++) out[i][v] = Floats{};
        }
        const float ratio = m.offset ? m.offset_unit / m.scale_unit : 0.0f;
        for (int64_t g = 0; g < x.num_groups; g++) {
            Sums sums[PLANES][M][V];
            for (int64_t s = 0; s < steps; s++) {
                const int64_t at = g * steps + s;
                UNROLL for (int v = 0; v < V; v++) {
                    const uint8_t* from = words + (v / PARTS) * panel_bytes + at * STEP + v % PARTS * WIDTH;
                    __builtin_prefetch(from + 2048);
                    const Words w = load<Words>(from);
                    if (CODE == BYTES) {
                        UNROLL for (int i = 0; i < M; i++) sums[0][i][v].add(w, high[i], low[i], at);
                    } else {
                        const Words a = w & 0x0f0f0f0f, b = w >> 4 & 0x0f0f0f0f;
                        UNROLL for (int p = 0; p < PLANES; p++) {
                            const Words first = CODE == NIBBLES ? a : in_table(m.table + 16 * p, a);
                            const Words second = CODE == NIBBLES ? b : in_table(m.table + 16 * p, b);
                            UNROLL for (int i = 0; i < M; i++) {
                                sums[p][i][v].add(first, high[i], low[i], 2 * at);
                                sums[p][i][v].add(second, high[i], low[i], 2 * at + 1);
                            }
                        }
                    }
                }
            }
            UNROLL for (int v = 0; v < V; v++) {
                const int64_t place = ((panel + v / PARTS) * x.num_groups + g) * PANEL + v % PARTS * LANES;
                const Floats scale = m.scale ? load16((const Half*)m.scale + place) : spread(1.0f);
                UNROLL for (int i = 0; i < M; i++) {
                    const int32_t inputs = x.sums[(row + i) * x.num_groups + g];
                    Floats number;
                    if (CODE == TABLE) {
                        const Ints upper = sums[PLANES - 1][i][v].all() - 128 * inputs;
                        number = fma(__builtin_convertvector(upper, Floats), spread(256.0f),
                                     __builtin_convertvector(sums[0][i][v].all(), Floats));
                    } else {
                        number = __builtin_convertvector(sums[0][i][v].all() - m.middle * inputs, Floats);
                    }
                    out[i][v] = fma(number, scale, out[i][v]);
                    if (m.offset) {
                        const Floats offset = load16((const Half*)m.offset + place);
                        out[i][v] = fma(offset, spread(-ratio * (float)inputs), out[i][v]);
                    }
                }
            }
        }
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < V; v++) out[i][v] *= x.steps[row + i] * m.scale_unit;
    }
};

// Plain activations: of HAS_BF16 and bfloat16 weights pairs as they are, else float32
struct Plain {
    const char* at;
    int64_t row_bytes;
};

inline Floats from_float8(Words byte, int32_t code) {
    // Signs and numbers in a float32's place: 2^120 or 2^112 too small, subnormal ones too.
    const Words sign = (byte & 0x80) << 24, rest = byte & 0x7f;
    if (code == E4M3) {
        const Floats v = (Floats)(sign | rest << 20) * 0x1p120f;
        return rest == 0x7f ? spread(NAN) : v;
    }
    const Floats v = (Floats)(sign | rest << 21) * 0x1p112f;
    return rest > 0x7c ? spread(NAN) : rest == 0x7c ? (sign ? spread(-INFINITY) : spread(INFINITY)) : v;
}

// M rows with V vectors of outputs, of floats
template <int M, int V, int CODE>
struct FloatTile {
    static void run(const Matrix& m, const Plain& x, int64_t row, int64_t panel, Floats (&out)[M][V]) {
        constexpr int INPUTS = CODE == BF16 ? 2 : 4;
        const int64_t num_groups = m.num_in / m.group, steps = m.group / INPUTS;
        const int64_t panel_bytes = m.num_in / INPUTS * STEP;
        const uint8_t* words = m.words + panel * panel_bytes;
        const char* rows[M];
        UNROLL for (int i = 0; i < M; i++) {
            rows[i] = x.at + (row + i) * x.row_bytes;
            UNROLL for (int v = 0; v < V; v++) out[i][v] = Floats{};
        }
        for (int64_t g = 0; g < num_groups; g++) {
            Floats sums[M][V] = {};
            for (int64_t at = g * steps; at < (g + 1) * steps; at++) {
                UNROLL for (int v = 0; v < V; v++) {
                    const uint8_t* from = words + (v / PARTS) * panel_bytes + at * STEP + v % PARTS * WIDTH;
                    __builtin_prefetch(from + 2048);
                    const Words w = load<Words>(from);
#if HAS_BF16
                    if (CODE == BF16) {
                        UNROLL for (int i = 0; i < M; i++) {
                            const __m512i pair = _mm512_set1_epi32(load<int32_t>(rows[i] + 4 * at));
                            sums[i][v] =
                                (Floats)_mm512_dpbf16_ps((__m512)sums[i][v], (__m512bh)w, (__m512bh)pair);
                        }
                        continue;
                    }
#endif
                    UNROLL for (int k = 0; k < INPUTS; k++) {
                        Floats number;
                        if (CODE == BF16)
                            number = k ? (Floats)(w & 0xffff0000) : widened(w);
                        else
                            number = from_float8(w >> 8 * k & 0xff, CODE);
                        UNROLL for (int i = 0; i < M; i++) {
                            const float input = load<float>(rows[i] + 4 * (INPUTS * at + k));
                            sums[i][v] = fma(number, spread(input), sums[i][v]);
                        }
                    }
                }
            }
            UNROLL for (int v = 0; v < V; v++) {
                const int64_t place = ((panel + v / PARTS) * num_groups + g) * PANEL + v % PARTS * LANES;
                UNROLL for (int i = 0; i < M; i++)
                    out[i][v] = m.scale ? fma(sums[i][v], load16((const Half*)m.scale + place), out[i][v])
                                        : sums[i][v];
            }
        }
        if (!m.scale) return;
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < V; v++) out[i][v] *= m.scale_unit;
    }
};

// Where results go

template <class T>
inline void store_some(T* to, Floats v, int64_t room) {
    if (room >= LANES) return store16(to, v);
    T parts[LANES];
    store16(parts, v);
    for (int64_t i = 0; i < room; i++) to[i] = parts[i];
}

inline Floats activated(Floats x, int act) {
    switch (act) {
        case SILU: return x / (1.0f + exponential(-x));
        case GELU_TANH: return x / (1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
        case RELU: return larger(x, Floats{});
        default:
            for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
            return x;
    }
}

inline Floats bounded(Floats x, float least, float most) {
    const Floats above = larger(x, spread(least));
    return above < most ? above : spread(most);
}

template <class T>
inline Floats gated(Floats opening, Floats x, const Gating& gate) {
    const Floats g = rounded<T>(opening), up = rounded<T>(x);
    if (gate.limit == 0) return rounded<T>(activated(g, gate.act)) * up;
    const Floats least = bounded(g, -INFINITY, gate.limit);
    return least / (1.0f + exponential(-gate.alpha * least)) * (bounded(up, -gate.limit, gate.limit) + 1.0f);
}

// Where the outputs of a panel lie in y
inline int64_t column(const Matrix& m, int64_t panel) {
    return PANEL * (m.gated ? panel / 2 + panel % 2 * (m.num_out / PANEL / 2) : panel);
}

template <class T>
inline Floats biased(const Matrix& m, Floats sums, int64_t first) {
    if (m.rows) sums *= load<Floats>(m.rows + first);
    if (!m.bias) return sums;
    T parts[LANES] = {};
    std::copy_n((const T*)m.bias + first, std::min<int64_t>(m.stored - first, LANES), parts);
    return sums + load16(parts);
}

// The results of V vectors from `panel` on; of gates and what they open together if there is a gate
template <class T, int V>
inline void finish(const Matrix& m, const Floats (&sums)[V], T* y, int64_t row, int64_t panel, const Gating& gate) {
    if (gate.act) {
        constexpr int PAIR = 2 * PARTS;
        const int64_t hidden = m.stored / 2;
        for (int v = 0; v + PARTS < V; v += v % PAIR == PARTS - 1 ? PARTS + 1 : 1) {
            const int64_t first = column(m, panel + v / PARTS) + v % PARTS * LANES;
            const Floats opening = biased<T>(m, sums[v], first), x = biased<T>(m, sums[v + PARTS], hidden + first);
            store16(y + row * hidden + first, gated<T>(opening, x, gate));
        }
        return;
    }
    UNROLL for (int v = 0; v < V; v++) {
        const int64_t first = column(m, panel + v / PARTS) + v % PARTS * LANES, room = m.stored - first;
        if (room > 0) store_some(y + row * m.stored + first, biased<T>(m, sums[v], first), room);
    }
}

// The outputs of PANELS panels from `panel` on, of M rows
template <template <int, int, int> class Tile, int CODE, int M, int PANELS, class T, class X>
void some_rows(const Matrix& m, const X& x, T* y, int64_t row, int64_t panel, const Gating& gate) {
    Floats sums[M][PANELS * PARTS];
    Tile<M, PANELS * PARTS, CODE>::run(m, x, row, panel, sums);
    UNROLL for (int i = 0; i < M; i++) finish<T>(m, sums[i], y, row + i, panel, gate);
}

// How much is multiplied at once: as many sums as there are registers for.  Measured on Zen 5, and there with AVX2 and
// without VNNI and BF16; vectors of 4 lanes have not been.
struct AtOnce {
    int panels, rows;
};

constexpr AtOnce at_once(int code) {
    const bool is_float = code == BF16 || code == E4M3 || code == E5M2;
    if (LANES < 16) {
        if (is_float && code != BF16) return {1, 6};  // each is decoded for as many rows as can be
        return {2, LANES == 8 && !is_float && code != TABLE ? 3 : 2};
    }
    if (is_float) return {4, 6};
    if (code == NIBBLES || code == MAPPED) return HAS_VNNI ? AtOnce{4, 3} : AtOnce{2, 4};
    return {2, code == BYTES ? 5 : 3};
}

template <template <int, int, int> class Tile, int CODE, int MOST, int PANELS, class T, class X>
void so_many_rows(int num, const Matrix& m, const X& x, T* y, int64_t row, int64_t panel, const Gating& gate) {
    if (num == MOST) return some_rows<Tile, CODE, MOST, PANELS>(m, x, y, row, panel, gate);
    if constexpr (MOST > 1) so_many_rows<Tile, CODE, MOST - 1, PANELS>(num, m, x, y, row, panel, gate);
}

// In parts of about the same size: one row alone waits for its own sums
template <template <int, int, int> class Tile, int CODE, int PANELS, class T, class X>
void all_rows(const Matrix& m, const X& x, T* y, int64_t rows, int64_t panel, const Gating& gate) {
    constexpr int MOST = PANELS == at_once(CODE).panels ? at_once(CODE).rows : 2;
    int64_t row = 0;
    for (int64_t parts = (rows + MOST - 1) / MOST; parts > 0; parts--) {
        const int num = (rows - row + parts - 1) / parts;
        so_many_rows<Tile, CODE, MOST, PANELS>(num, m, x, y, row, panel, gate);
        row += num;
    }
}

// y = x W^T.  One row: as many panels as can be are fetched beside each other
template <template <int, int, int> class Tile, int CODE, class T, class X>
void multiply(const Matrix& m, const X& x, T* y, int64_t rows, const Gating& gate) {
    constexpr int PANELS = at_once(CODE).panels, FEW = LANES == 16 ? 4 : 2;
    const int64_t panels = m.num_out / PANEL;
    const int64_t each = rows == 1 ? FEW : gate.act ? std::max(PANELS, 2) : PANELS;  // gates lie beside what they open
    for_all((panels + each - 1) / each, [&](int64_t i) {
        int64_t panel = i * each;
        const int64_t end = std::min(panel + each, panels);
        if (rows == 1 && panel + FEW == end) return some_rows<Tile, CODE, 1, FEW>(m, x, y, 0, panel, gate);
        if (panel + PANELS == end) return all_rows<Tile, CODE, PANELS>(m, x, y, rows, panel, gate);
        for (; panel + 2 <= end; panel += 2) all_rows<Tile, CODE, 2>(m, x, y, rows, panel, gate);
        for (; panel < end; panel++) all_rows<Tile, CODE, 1>(m, x, y, rows, panel, gate);
    });
}

// Tiles of AMX, where the CPU has them: 32 rows by two panels at once, rows and panels straight from memory

#if HAS_AMX
struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

bool may_use_tiles() {
    static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // the kernel keeps their state from now on
    return may;
}

// Compilers do not know that tiles read memory: what has been written to it must be there by now.
inline void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Tiles 0 to 3: sums, of rows by panels (0, 1 of the first 16 rows); 4, 5: rows; 6, 7: panels
inline void shape_tiles(int64_t first, int64_t second, int row_bytes) {
    Shapes shapes;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = i == 4 || i == 5 ? row_bytes : 64;
    for (int i : {0, 1, 4}) shapes.rows[i] = first;
    for (int i : {2, 3, 5}) shapes.rows[i] = second ? second : 1;
    for (int i : {6, 7}) shapes.rows[i] = row_bytes / 4;
    written(&shapes);
    _tile_loadconfig(&shapes);
}

inline void fetch(const uint8_t* from) {
    UNROLL for (int i = 0; i < 16; i++) __builtin_prefetch(from + 64 * i);
}

// What tiles have summed up: rows by two panels
template <class T>
void finish_tiles(const Matrix& m, const float* sums, T* y, int64_t row, int64_t rows, int64_t panel, bool two, const Gating& gate) {
    for (int64_t i = 0; i < rows; i++) {
        const Floats both[2] = {load<Floats>(sums + 16 * i), load<Floats>(sums + 256 + 16 * i)};
        if (two) {
            finish<T>(m, both, y, row + i, panel, gate);
        } else {
            const Floats one[1] = {both[0]};
            finish<T>(m, one, y, row + i, panel, gate);
        }
    }
}

// Two panels, the second one perhaps absent, of bfloat16
template <class T>
void float_tiles(const Matrix& m, const Plain& x, T* y, int64_t rows, int64_t panel, bool two, const Gating& gate) {
    const int64_t panel_bytes = m.num_in * 32;
    const uint8_t* words = m.words + panel * panel_bytes;
    alignas(64) float sums[4][256];
    written(x.at);
    for (int64_t row = 0; row < rows; row += 32) {
        const int64_t first = std::min<int64_t>(16, rows - row), second = std::clamp<int64_t>(rows - row - 16, 0, 16);
        if (row == 0 || rows - row < 32) shape_tiles(first, second, 64);
        const char *above = x.at + row * x.row_bytes, *below = above + 16 * x.row_bytes;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t at = 0; at < panel_bytes; at += 1024) {
            _tile_loadd(4, above + at / 16, x.row_bytes);
            if (row == 0) fetch(words + at + 4096);
            _tile_loadd(6, words + at, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (two) {
                if (row == 0) fetch(words + panel_bytes + at + 4096);
                _tile_loadd(7, words + panel_bytes + at, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (!second) continue;
            _tile_loadd(5, below + at / 16, x.row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (two) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        finish_tiles(m, sums[0], y, row, first, panel, two, gate);
        if (!second) continue;
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        finish_tiles(m, sums[2], y, row + 16, second, panel, two, gate);
    }
    _tile_release();
}

template <class T>
void multiply_tiles(const Matrix& m, const Plain& x, T* y, int64_t rows, const Gating& gate) {
    const int64_t panels = m.num_out / PANEL;
    for_all((panels + 1) / 2, [&](int64_t i) { float_tiles(m, x, y, rows, 2 * i, 2 * i + 1 < panels, gate); });
}

// The same of integers of 8 bits or 4, in groups of inputs
template <class T>
void integer_tiles(const Matrix& m, const Rounded& x, T* y, int64_t rows, int64_t panel, bool two, const Gating& gate) {
    const int64_t num_in = m.num_in, panel_bytes = num_in * PANEL, groups = x.num_groups;
    const int64_t chunk = std::min<int64_t>(64, m.group), chunks = m.group / chunk;
    const uint8_t* bytes = m.words + panel * panel_bytes;
    if (m.code != BYTES) {
        uint8_t* room = (uint8_t*)scratch<1>(2 * panel_bytes);
        for (int64_t at = 0; at < (two ? 2 : 1) * panel_bytes / 2; at += STEP) {
            const uint8_t* from = m.words + panel * panel_bytes / 2 + at;
            __builtin_prefetch(from + 2048);
            const Words w = load<Words>(from), a = w & 0x0f0f0f0f, b = w >> 4 & 0x0f0f0f0f;
            store(room + 2 * at, m.code == MAPPED ? in_table(m.table, a) : a);
            store(room + 2 * at + STEP, m.code == MAPPED ? in_table(m.table, b) : b);
        }
        bytes = room;
    }
    written(bytes);
    alignas(64) int32_t sums[4][256];
    alignas(64) float all[2][256];
    const float ratio = m.offset ? m.offset_unit / m.scale_unit : 0.0f;
    for (int64_t row = 0; row < rows; row += 16) {
        const int64_t num = std::min<int64_t>(16, rows - row);
        if (row == 0 || num < 16) shape_tiles(num, num, (int)chunk);
        const char *high = x.high + row * x.row_bytes, *low = x.low + row * x.row_bytes;
        std::memset(all, 0, sizeof all);
        for (int64_t g = 0; g < groups; g++) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t c = 0; c < chunks; c++) {
                const int64_t at = g * m.group + c * chunk;
                _tile_loadd(4, high + at, x.row_bytes);
                _tile_loadd(5, low + at, x.row_bytes);
                _tile_loadd(6, bytes + at * PANEL, 64);
                _tile_dpbsud(0, 4, 6);
                _tile_dpbsud(2, 5, 6);
                if (!two) continue;
                _tile_loadd(7, bytes + panel_bytes + at * PANEL, 64);
                _tile_dpbsud(1, 4, 7);
                _tile_dpbsud(3, 5, 7);
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int p = 0; p < (two ? 2 : 1); p++) {
                const int64_t place = ((panel + p) * groups + g) * PANEL;
                const Floats scale = m.scale ? load16((const Half*)m.scale + place) : spread(1.0f);
                const Floats offset = m.offset ? load16((const Half*)m.offset + place) : Floats{};
                for (int64_t i = 0; i < num; i++) {
                    const int32_t inputs = x.sums[(row + i) * groups + g];
                    const Ints both = (load<Ints>(sums[p] + 16 * i) << 8) + load<Ints>(sums[2 + p] + 16 * i);
                    const Floats number = __builtin_convertvector(both - m.middle * inputs, Floats);
                    Floats sum = fma(number, scale, load<Floats>(all[p] + 16 * i));
                    if (m.offset) sum = fma(offset, spread(-ratio * (float)inputs), sum);
                    store(all[p] + 16 * i, sum);
                }
            }
        }
        for (int p = 0; p < (two ? 2 : 1); p++)
            for (int64_t i = 0; i < num; i++)
                store(all[p] + 16 * i, load<Floats>(all[p] + 16 * i) * (x.steps[row + i] * m.scale_unit));
        finish_tiles(m, all[0], y, row, num, panel, two, gate);
    }
    _tile_release();
}

template <class T>
void multiply_tiles(const Matrix& m, const Rounded& x, T* y, int64_t rows, const Gating& gate) {
    const int64_t panels = m.num_out / PANEL;
    for_all((panels + 1) / 2, [&](int64_t i) { integer_tiles(m, x, y, rows, 2 * i, 2 * i + 1 < panels, gate); });
}
#else
bool may_use_tiles() { return false; }
template <class T, class X>
void multiply_tiles(const Matrix&, const X&, T*, int64_t, const Gating&) {}
#endif

constexpr int64_t FEW_ROWS = 16;  // that are prepared faster than threads are called

template <class Task>
void for_rows(int64_t rows, const Task& task) {
    if (rows > FEW_ROWS) return for_all(rows, task);
    for (int64_t row = 0; row < rows; row++) task(row);
}

template <class T>
Plain widened_rows(const Matrix& m, const T* x, int64_t rows) {
    float* out = (float*)scratch<0>(rows * m.num_in * 4);
    for_rows(rows, [&](int64_t row) {
        float* to = out + row * m.num_in;
        int64_t k = 0;
        for (; k + LANES <= m.num_used; k += LANES) store(to + k, load16(x + row * m.num_used + k));
        for (; k < m.num_used; k++) to[k] = to_float(x[row * m.num_used + k]);
        std::fill(to + k, to + m.num_in, 0.0f);
    });
    return {(const char*)out, m.num_in * 4};
}

// The rows themselves, or a copy of many, or of such as are not as long as those of the matrix
Plain same_rows(const Matrix& m, const Bf16* x, int64_t rows) {
    if (rows <= FEW_ROWS && m.num_used == m.num_in) return {(const char*)x, m.num_in * 2};
    const int64_t row_bytes = m.num_in * 2 + 64;
    char* out = scratch<0>(rows * row_bytes);
    for_rows(rows, [&](int64_t row) {
        std::memcpy(out + row * row_bytes, x + row * m.num_used, m.num_used * 2);
        std::memset(out + row * row_bytes + m.num_used * 2, 0, row_bytes - m.num_used * 2);
    });
    return {out, row_bytes};
}

template <class T>
void product(const Matrix& m, const T* x, T* y, int64_t rows, const Gating& gate) {
    if (m.code >= BYTES && m.code <= TABLE) {
        const Rounded all(rows, m.num_in, m.num_in / m.group);
        for_rows(rows, [&](int64_t row) { round_row(x + row * m.num_used, row, m.num_used, m.group, all); });
        // Sums of integers are the same either way.
        if (rows >= 5 && m.code != TABLE && (m.group % 64 == 0 || m.group == 32) && may_use_tiles())
            return multiply_tiles(m, all, y, rows, gate);
        if (m.code == BYTES) return multiply<IntegerTile, BYTES>(m, all, y, rows, gate);
        if (m.code == NIBBLES) return multiply<IntegerTile, NIBBLES>(m, all, y, rows, gate);
        if (m.code == MAPPED) return multiply<IntegerTile, MAPPED>(m, all, y, rows, gate);
        return multiply<IntegerTile, TABLE>(m, all, y, rows, gate);
    }
    if constexpr (HAS_BF16 && std::is_same_v<T, Bf16>) {
        if (m.code == BF16) {
            const Plain plain = same_rows(m, x, rows);
            if (may_use_tiles()) return multiply_tiles(m, plain, y, rows, gate);
            return multiply<FloatTile, BF16>(m, plain, y, rows, gate);
        }
    }
    const Plain plain = widened_rows(m, x, rows);
#if !HAS_BF16
    if (m.code == BF16) return multiply<FloatTile, BF16>(m, plain, y, rows, gate);
#endif
    if (m.code == E4M3) return multiply<FloatTile, E4M3>(m, plain, y, rows, gate);
    multiply<FloatTile, E5M2>(m, plain, y, rows, gate);
}

}  // namespace

// Gated MLPs, of which each token takes some: E experts, k of a token.
struct Mixture {
    const Matrix *gate_up, *down;  // [E] of whole panels of gates and of what they open; [E]
    int64_t num, top_k, hidden, dim;
    Gating gate;
    int32_t weighs_input, type;  // an expert's input is times its weight, not what it gives
};

namespace {

// What every token takes besides, factor [T] times values [T, D], or values alone
template <class T>
struct More {
    const T* values;
    const float* factor;
};

// Token by token what its experts give, in their order, and then what is added to that
template <class T>
void sum_pairs(const Mixture& e, const int32_t* ids, const float* weights, const T* given, const int64_t* places,
               const More<T>& more, T* y, int64_t tokens) {
    for_rows(tokens, [&](int64_t token) {
        for (int64_t d = 0; d < e.dim; d += LANES) {
            Floats sum = {};
            for (int64_t pair = token * e.top_k; pair < (token + 1) * e.top_k; pair++) {
                if (ids[pair] >= e.num) continue;
                const float weight = e.weighs_input ? 1.0f : weights[pair];
                sum = fma(load16(given + places[pair] * e.dim + d), spread(weight), sum);
            }
            if (more.values) {
                const float factor = more.factor ? more.factor[token] : 1.0f;
                sum = fma(load16(more.values + token * e.dim + d), spread(factor), sum);
            }
            store16(y + token * e.dim + d, sum);
        }
    });
}

// given: [T * k, D], room for what each pair of a token and an expert gives, sorted by experts
template <class T>
void mix(const Mixture& e, const T* x, const int32_t* ids, const float* weights, const More<T>& more, T* given, T* y,
         int64_t tokens) {
    const int64_t pairs = tokens * e.top_k;
    int64_t* ends = (int64_t*)scratch<3>((e.num + 1 + 2 * pairs) * sizeof(int64_t));
    int64_t *order = ends + e.num + 1, *places = order + pairs;
    std::fill(ends, order, 0);
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] < e.num) ends[ids[pair] + 1]++;
    for (int64_t i = 0; i < e.num; i++) ends[i + 1] += ends[i];
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] < e.num) order[places[pair] = ends[ids[pair]]++] = pair;
    for (int64_t i = 0, first = 0; i < e.num; first = ends[i++]) {
        const int64_t rows = ends[i] - first;
        if (!rows) continue;
        T* inputs = (T*)scratch<4>(rows * e.dim * sizeof(T));
        T* hidden = (T*)scratch<5>(rows * e.hidden * sizeof(T));
        for_rows(rows, [&](int64_t row) {
            const int64_t pair = order[first + row];
            const T* from = x + pair / e.top_k * e.dim;
            T* to = inputs + row * e.dim;
            if (!e.weighs_input) {
                std::memcpy(to, from, e.dim * sizeof(T));
                return;
            }
            for (int64_t d = 0; d < e.dim; d += LANES) store16(to + d, load16(from + d) * weights[pair]);
        });
        product(e.gate_up[i], inputs, hidden, rows, e.gate);
        product(e.down[i], hidden, given + first * e.dim, rows, Gating{});
    }
    sum_pairs(e, ids, weights, given, places, more, y, tokens);
}

// Between products

struct Norm {
    const void* weight;  // [D], of the activations' type or float32
    float eps;
    int32_t is_wide;     // float32: it is multiplied before anything is rounded
};

template <class T>
inline Floats weighted(Floats normalized, const Norm& norm, int64_t at) {
    if (norm.is_wide) return normalized * load<Floats>((const float*)norm.weight + at);
    return rounded<T>(normalized) * load16((const T*)norm.weight + at);
}

template <class T>
inline float inverse_rms(const T* x, int64_t dim, float eps) {
    Floats squares = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        const Floats v = load16(x + d);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / (float)dim + eps);
}

template <class T>
void add_norm(const T* x, T* stream, bool has_stream, const Norm& norm, T* out, int64_t rows, int64_t dim) {
    for_rows(rows, [&](int64_t row) {
        const T* source = x + row * dim;
        if (has_stream) {
            T* to = stream + row * dim;
            for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(source + d) + load16(to + d));
            source = to;
        }
        const float inverse = inverse_rms(source, dim, norm.eps);
        for (int64_t d = 0; d < dim; d += LANES)
            store16(out + row * dim + d, weighted<T>(load16(source + d) * inverse, norm, d));
    });
}

template <class T>
void gate_rows(const T* x, T* y, int64_t rows, int64_t hidden, const Gating& gate) {
    for_rows(rows, [&](int64_t row) {
        const T *opening = x + row * 2 * hidden, *opened = opening + hidden;
        for (int64_t d = 0; d < hidden; d += LANES)
            store16(y + row * hidden + d, gated<T>(load16(opening + d), load16(opened + d), gate));
    });
}

// The first of the highest
template <class T>
int64_t highest(const T* x, int64_t num) {
    Floats most = spread(-INFINITY);
    Ints place = {}, at = {};
    for (int i = 0; i < LANES; i++) at[i] = i;
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES, at += LANES) {
        const Floats v = load16(x + i);
        place = v > most ? at : place;
        most = v > most ? v : most;
    }
    if (i < num) {
        T tail[LANES];
        std::fill_n(tail, LANES, x[i]);  // which is no first place but in its own
        std::copy(x + i, x + num, tail);
        const Floats v = load16(tail);
        place = v > most ? at : place;
        most = v > most ? v : most;
    }
    int64_t best = -1;
    const float value = largest(most);
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] == value && (best < 0 || place[lane] < best)) best = place[lane];
    return std::max<int64_t>(best, 0);
}

}  // namespace

// Heads as a layer has them, and its part of the cache [blocks, 2, num_kv, block_size, dim].
struct Heads {
    void* cache;
    const float* rope;  // [positions, 2, rotary]: cosines, and sines negative in the first half; or none
    const void* norm;   // [num + num_kv, dim] weights of queries' and keys' norms, or none
    float eps, scale;
    int32_t is_wide, type, interleaved;  // features 2i and 2i + 1 turn together, not i and i + rotary / 2
    int64_t num, num_kv, dim, rotary, block_size;
};

namespace {

template <class T>
void turned(T* x, const Heads& h, const float* rope) {
    const int64_t half = h.rotary / 2;
    if (h.interleaved || half % LANES) {
        for (int64_t i = 0; i < half; i++) {
            T &first = x[h.interleaved ? 2 * i : i], &second = x[h.interleaved ? 2 * i + 1 : half + i];
            const float a = to_float(first), b = to_float(second), *sin = rope + h.rotary;
            store_some(&first, spread(std::fma(b, sin[i], a * rope[i])), 1);
            store_some(&second, spread(std::fma(a, sin[half + i], b * rope[half + i])), 1);
        }
        return;
    }
    for (int64_t d = 0; d < half; d += LANES) {
        const Floats a = load16(x + d), b = load16(x + half + d);
        const float *cos = rope + d, *sin = rope + h.rotary + d;
        store16(x + d, fma(b, load<Floats>(sin), a * load<Floats>(cos)));
        store16(x + half + d, fma(a, load<Floats>(sin + half), b * load<Floats>(cos + half)));
    }
}

template <class T>
void write_heads(const Heads& h, const T* qkv, T* q, const int64_t* positions, const int64_t* slots, int64_t tokens) {
    const int64_t num_normed = h.num + h.num_kv, all = num_normed + h.num_kv;
    for_rows(tokens, [&](int64_t token) {
        const int64_t block = slots[token] / h.block_size, offset = slots[token] % h.block_size;
        const float* rope = h.rope ? h.rope + positions[token] * 2 * h.rotary : nullptr;
        for (int64_t head = 0; head < all; head++) {
            const T* from = qkv + (token * all + head) * h.dim;
            const bool is_value = head >= num_normed;
            const int64_t kv = head - h.num - (is_value ? h.num_kv : 0);
            T* to = head < h.num ? q + (token * h.num + head) * h.dim
                                 : (T*)h.cache + (((block * 2 + is_value) * h.num_kv + kv) * h.block_size + offset) * h.dim;
            if (is_value || !h.norm) {
                std::memcpy(to, from, h.dim * sizeof(T));
            } else {
                const Norm norm{(const char*)h.norm + head * h.dim * (h.is_wide ? 4 : 2), h.eps, h.is_wide};
                const float inverse = inverse_rms(from, h.dim, h.eps);
                for (int64_t d = 0; d < h.dim; d += LANES)
                    store16(to + d, weighted<T>(load16(from + d) * inverse, norm, d));
            }
            if (!is_value && rope) turned(to, h, rope);
        }
    });
}

constexpr int64_t MOST_DIM = 256;

// One query's heads head .. head + G, which share keys and values
template <class T, int G>
void attend(const Heads& h, const T* q, T* out, const int32_t* blocks, int64_t kv, int64_t first, int64_t end) {
    constexpr int64_t VECTORS = MOST_DIM / LANES;
    const int64_t num = end - first, vectors = h.dim / LANES, side = h.num_kv * h.block_size * h.dim;
    float* scores = (float*)scratch<2>((num + LANES) * G * 4);
    const int64_t stride = num + LANES;
    Floats queries[G][VECTORS];
    for (int g = 0; g < G; g++)
        for (int64_t d = 0; d < vectors; d++) queries[g][d] = load16(q + g * h.dim + d * LANES) * h.scale;
    float most[G];
    std::fill(most, most + G, -INFINITY);
    const auto line = [&](int64_t key, int64_t which) {
        const int64_t block = blocks[key / h.block_size];
        return (const T*)h.cache + (block * 2 + which) * side + (kv * h.block_size + key % h.block_size) * h.dim;
    };
    for (int64_t j = 0; j < num; j++) {
        const T* key = line(first + j, 0);
        Floats sums[G] = {};
        for (int64_t d = 0; d < vectors; d++) {
            const Floats k = load16(key + d * LANES);
            UNROLL for (int g = 0; g < G; g++) sums[g] = fma(k, queries[g][d], sums[g]);
        }
        UNROLL for (int g = 0; g < G; g++) {
            const float score = total(sums[g]);
            scores[g * stride + j] = score;
            most[g] = std::max(most[g], score);
        }
    }
    float inverse[G];
    for (int g = 0; g < G; g++) {
        float* s = scores + g * stride;
        std::fill(s + num, s + stride, -INFINITY);
        Floats mass = {};
        for (int64_t j = 0; j < num; j += LANES) {
            const Floats e = exponential(load<Floats>(s + j) - most[g]);
            store(s + j, e);
            mass += e;
        }
        inverse[g] = 1.0f / sum(mass);
    }
    Floats sums[G][VECTORS];
    for (int g = 0; g < G; g++)
        for (int64_t d = 0; d < vectors; d++) sums[g][d] = Floats{};
    for (int64_t j = 0; j < num; j++) {
        const T* value = line(first + j, 1);
        for (int64_t d = 0; d < vectors; d++) {
            const Floats v = load16(value + d * LANES);
            UNROLL for (int g = 0; g < G; g++) sums[g][d] = fma(v, spread(scores[g * stride + j]), sums[g][d]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int64_t d = 0; d < vectors; d++) store16(out + g * h.dim + d * LANES, sums[g][d] * inverse[g]);
}

struct Query {
    int32_t token, row, first, end;  // it sees the keys first .. end of its row
};

template <class T>
void attend_all(const Heads& h, const T* q, T* out, const int32_t* tables, int64_t width, const Query* queries, int64_t num) {
    const int64_t group = h.num / h.num_kv;
    const auto one = [&](int64_t i) {
        const Query& query = queries[i / h.num_kv];
        const int64_t kv = i % h.num_kv, at = (query.token * h.num + kv * group) * h.dim;
        const int32_t* blocks = tables + query.row * width;
        int64_t g = 0;
        for (; g + 4 <= group; g += 4)
            attend<T, 4>(h, q + at + g * h.dim, out + at + g * h.dim, blocks, kv, query.first, query.end);
        for (; g + 2 <= group; g += 2)
            attend<T, 2>(h, q + at + g * h.dim, out + at + g * h.dim, blocks, kv, query.first, query.end);
        for (; g < group; g++)
            attend<T, 1>(h, q + at + g * h.dim, out + at + g * h.dim, blocks, kv, query.first, query.end);
    };
    for_all(num * h.num_kv, one);
}

}  // namespace

SYMBOL int pellucid_lanes() { return LANES; }
SYMBOL int pellucid_features() { return HAS_BF16 | HAS_VNNI << 1 | HAS_AMX << 2; }

// The CPU of each thread, the first one's being the caller's; to be said before anything else is called
SYMBOL void pellucid_cpus(const int32_t* cpus, int64_t num) {
    pool->num_cpus = (int)std::min<int64_t>(num, MOST_THREADS);
    std::copy_n(cpus, pool->num_cpus, pool->cpus);
}

// [blocks, 16, words] of 32 bits -> [blocks, words, 16], into memory that may be of large pages
SYMBOL void pellucid_panels(const uint32_t* from, uint32_t* to, int64_t blocks, int64_t words) {
    const uintptr_t first = ((uintptr_t)to + 4095) / 4096 * 4096, last = (uintptr_t)(to + blocks * words * 16);
#ifdef MADV_HUGEPAGE
    if (last > first + (2 << 20)) madvise((void*)first, (last - first) / 4096 * 4096, MADV_HUGEPAGE);
#else
    (void)(first + last);
#endif
    for_all(blocks, [&](int64_t block) {
        const uint32_t* rows = from + block * 16 * words;
        uint32_t* out = to + block * 16 * words;
        for (int64_t w = 0; w < words; w++)
            for (int i = 0; i < 16; i++) out[w * 16 + i] = rows[i * words + w];
    });
}

// y [M, N] = x [M, K] W^T + bias; with a gate [M, N / 2], act(gate) * up of W = [gate; up]
SYMBOL void pellucid_product(const Matrix* m, const void* x, void* y, int64_t rows, int32_t gate) {
    if (m->type == IS_BF16)
        product(*m, (const Bf16*)x, (Bf16*)y, rows, Gating{gate});
    else
        product(*m, (const Half*)x, (Half*)y, rows, Gating{gate});
}

// y [T, D] = what a token's experts, ids [T, k], give for x [T, D], weighed, and factor * more if there is any
SYMBOL void pellucid_mix(const Mixture* e, const void* x, const int32_t* ids, const float* weights, const void* more,
                         const float* factor, void* given, void* y, int64_t tokens) {
    if (e->type == IS_BF16)
        mix(*e, (const Bf16*)x, ids, weights, More<Bf16>{(const Bf16*)more, factor}, (Bf16*)given, (Bf16*)y, tokens);
    else
        mix(*e, (const Half*)x, ids, weights, More<Half>{(const Half*)more, factor}, (Half*)given, (Half*)y, tokens);
}

// stream [M, D] += x, if there is one; out = its norm
SYMBOL void pellucid_add_norm(const void* x, void* stream, const void* weight, void* out, int64_t rows, int64_t dim,
                              float eps, int32_t is_wide, int32_t type) {
    const Norm norm{weight, eps, is_wide};
    if (type == IS_BF16)
        add_norm((const Bf16*)x, (Bf16*)stream, stream != nullptr, norm, (Bf16*)out, rows, dim);
    else
        add_norm((const Half*)x, (Half*)stream, stream != nullptr, norm, (Half*)out, rows, dim);
}

// y [M, hidden] = act(gate) * up of x [M, 2 * hidden]
SYMBOL void pellucid_gate(const void* x, void* y, int64_t rows, int64_t hidden, int32_t gate, int32_t type) {
    if (type == IS_BF16)
        gate_rows((const Bf16*)x, (Bf16*)y, rows, hidden, Gating{gate});
    else
        gate_rows((const Half*)x, (Half*)y, rows, hidden, Gating{gate});
}

// The place of the highest of each row x [M, num], the first one in a tie
SYMBOL void pellucid_highest(const void* x, int64_t* places, int64_t rows, int64_t num, int32_t type) {
    for (int64_t row = 0; row < rows; row++)
        places[row] = type == IS_BF16 ? highest((const Bf16*)x + row * num, num)
                                      : highest((const Half*)x + row * num, num);
}

// qkv [T, (num + 2 num_kv) * dim] -> q [T, num, dim], normalized and turned; keys and values into the cache.  Then
// attention of single queries over their rows' blocks, tables [rows, width], into out [T, num, dim]
SYMBOL void pellucid_attend(const Heads* h, const void* qkv, void* q, void* out, const int64_t* positions,
                            const int64_t* slots, int64_t tokens, const int32_t* tables, int64_t width,
                            const Query* queries, int64_t num) {
    if (h->type == IS_BF16) {
        write_heads(*h, (const Bf16*)qkv, (Bf16*)q, positions, slots, tokens);
        attend_all(*h, (const Bf16*)q, (Bf16*)out, tables, width, queries, num);
    } else {
        write_heads(*h, (const Half*)qkv, (Half*)q, positions, slots, tokens);
        attend_all(*h, (const Half*)q, (Half*)out, tables, width, queries, num);
    }
}
