// A stand-in for the part of the Ascend C API that our kernel uses: the same calls on one thread
// of a CPU, with the rules of the device that can be checked without it (alignment, repeats,
// buffers that are allocated before use). Written from the public documentation.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#define __aicore__
#define __global__
#define __gm__
#define __CCE_AICORE__ STAND_IN_ARCH
#define GM_ADDR uint8_t *
#define PIPE_V 0
#define GET_TILING_DATA(data, tiling) const auto data = *reinterpret_cast<const MtpRejectionSampleTilingData *>(tiling)
#define CHECK(condition) do { if (!(condition)) { fail(#condition, __LINE__); } } while (0)

#include "mtp_rejection_sample_tiling.h"
using optiling::MtpRejectionSampleTilingData;

[[noreturn]] void fail(const char *what, int line);
extern uint32_t block_index, block_count;
using event_t = int;

namespace AscendC {

enum class HardEvent { V_S, S_V, MTE2_S, S_MTE3, MTE3_S };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class TPosition { VECIN, VECOUT, VECCALC };
enum class CacheLine { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
struct DataCopyExtParams { uint16_t count; uint32_t length, source, target, reserved; };

inline uint32_t GetBlockIdx() { return block_index; }
inline uint32_t GetBlockNum() { return block_count; }

template <typename T>
struct GlobalTensor {
    T *data = nullptr;
    void SetGlobalBuffer(T *buffer) { data = buffer; }
    T GetValue(uint64_t i) const { return data[i]; }
    void SetValue(uint64_t i, T value) { data[i] = value; }
    GlobalTensor operator[](uint64_t i) const { return {data + i}; }
};

template <typename T>
struct LocalTensor {
    T *data = nullptr;
    uint64_t size = 0;  // elements from `data` to the end of the buffer
    T GetValue(uint32_t i) const { CHECK(i < size); return data[i]; }
    void SetValue(uint32_t i, T value) const { CHECK(i < size); data[i] = value; }
    LocalTensor operator[](uint32_t i) const { CHECK(i <= size); return {data + i, size - i}; }
    template <typename U> LocalTensor<U> ReinterpretCast() const { return {reinterpret_cast<U *>(data), size * sizeof(T) / sizeof(U)}; }
    T *use(uint32_t count) const
    {
        CHECK(count <= size && reinterpret_cast<uintptr_t>(data) % 32 == 0);
        return data;
    }
};

struct Memory {
    std::vector<uint8_t> bytes;
    uint8_t *start = nullptr;
    uint32_t length = 0;
    void reserve(uint32_t n)
    {
        bytes.assign(n + 64, 0xFF);  // all bits set: not a number, an absurd integer
        start = bytes.data() + (32 - reinterpret_cast<uintptr_t>(bytes.data()) % 32) % 32;
        length = n;
    }
    template <typename T> LocalTensor<T> tensor() { CHECK(length); return {reinterpret_cast<T *>(start), length / sizeof(T)}; }
};

template <TPosition position>
struct TBuf {
    Memory memory;
    template <typename T> LocalTensor<T> Get() { return memory.tensor<T>(); }
};

template <TPosition position, int depth>
struct TQue {
    std::vector<Memory> memories;
    uint32_t next = 0, allocated = 0, queued = 0;
    template <typename T> LocalTensor<T> AllocTensor()
    {
        CHECK(allocated < memories.size());
        ++allocated;
        return memories[next++ % memories.size()].tensor<T>();
    }
    template <typename T> void EnQue(const LocalTensor<T> &) { ++queued; }
    template <typename T> LocalTensor<T> DeQue()
    {
        CHECK(queued == 1);
        --queued;
        return memories[(next - 1) % memories.size()].tensor<T>();
    }
    template <typename T> void FreeTensor(const LocalTensor<T> &) { CHECK(allocated); --allocated; }
};

struct TPipe {
    uint32_t used = 0;
    template <TPosition p> void InitBuffer(TBuf<p> &buffer, uint32_t length)
    {
        CHECK(length % 32 == 0);
        buffer.memory.reserve(length);
        spend(length);
    }
    template <TPosition p, int d> void InitBuffer(TQue<p, d> &queue, uint32_t count, uint32_t length)
    {
        CHECK(length % 32 == 0);
        queue.memories.resize(count);
        for (auto &memory : queue.memories) { memory.reserve(length); }
        spend(count * length);
    }
    void spend(uint32_t length) { used += length; CHECK(used <= 184 * 1024); }
    int FetchEventID(HardEvent) { return 0; }
};
inline TPipe *GetTPipePtr() { static TPipe pipe; return &pipe; }
template <HardEvent e> void SetFlag(event_t) {}
template <HardEvent e> void WaitFlag(event_t) {}
template <int pipe> void PipeBarrier() {}

template <typename T>
void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t count)
{
    CHECK(count * sizeof(T) % 32 == 0);
    std::memcpy(to.use(count), from.data, count * sizeof(T));
}
template <typename T>
void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &p)
{
    CHECK(p.count == 1);
    std::memcpy(to.data, from.use(p.length / sizeof(T)), p.length);
}
template <typename T, CacheLine line> void DataCacheCleanAndInvalid(const GlobalTensor<T> &) {}

using Floats = LocalTensor<float>;
template <typename F> void each(const Floats &to, const Floats &from, uint32_t n, F f)
{
    float *y = to.use(n), *x = from.use(n);
    for (uint32_t i = 0; i < n; ++i) { y[i] = f(x[i], i); }
}
inline void Duplicate(const Floats &to, float value, uint32_t n) { each(to, to, n, [=](float, int) { return value; }); }
inline void Adds(const Floats &to, const Floats &x, float y, uint32_t n) { each(to, x, n, [=](float v, int) { return v + y; }); }
inline void Muls(const Floats &to, const Floats &x, float y, uint32_t n) { each(to, x, n, [=](float v, int) { return v * y; }); }
inline void Maxs(const Floats &to, const Floats &x, float y, uint32_t n) { each(to, x, n, [=](float v, int) { return v < y ? y : v; }); }
inline void Exp(const Floats &to, const Floats &x, uint32_t n) { each(to, x, n, [](float v, int) { return std::exp(v); }); }
inline void Add(const Floats &to, const Floats &x, const Floats &y, uint32_t n) { float *o = y.use(n); each(to, x, n, [=](float v, int i) { return v + o[i]; }); }
inline void Sub(const Floats &to, const Floats &x, const Floats &y, uint32_t n) { float *o = y.use(n); each(to, x, n, [=](float v, int i) { return v - o[i]; }); }

inline void CompareScalar(const LocalTensor<uint8_t> &mask, const Floats &x, float y, CMPMODE mode, uint32_t n)
{
    CHECK(n % 64 == 0);
    const float *v = x.use(n);
    uint8_t *bits = mask.use(n / 8);
    std::memset(bits, 0, n / 8);
    for (uint32_t i = 0; i < n; ++i) {
        const bool holds = mode == CMPMODE::LT ? v[i] < y : mode == CMPMODE::GT ? v[i] > y : mode == CMPMODE::EQ ? v[i] == y
                         : mode == CMPMODE::LE ? v[i] <= y : mode == CMPMODE::GE ? v[i] >= y : v[i] != y;
        bits[i / 8] |= static_cast<uint8_t>(holds << (i % 8));
    }
}
inline void Select(const Floats &to, const LocalTensor<uint8_t> &mask, const Floats &x, float y, SELMODE mode, uint32_t n)
{
    CHECK(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE);
    const uint8_t *bits = mask.use(n / 8);
    each(to, x, n, [=](float v, uint32_t i) { return bits[i / 8] >> (i % 8) & 1 ? v : y; });
}

inline float tree(const float *x, uint32_t n) { return n == 1 ? x[0] : tree(x, n / 2) + tree(x + n / 2, n - n / 2); }
template <typename T>
void ReduceSum(const LocalTensor<T> &to, const LocalTensor<T> &x, const LocalTensor<T> &work, uint32_t n)
{
    CHECK(work.size >= (n / 64 + 7) / 8 * 8);
    to.use(1)[0] = tree(x.use(n), n);
}
template <typename T>
void ReduceMax(const LocalTensor<T> &to, const LocalTensor<T> &x, const LocalTensor<T> &work, uint32_t n, bool index)
{
    CHECK(index && work.size >= 4 * (n / 64 + 8));
    const T *v = x.use(n);
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; ++i) { if (v[i] > v[best]) { best = i; } }
    to.use(2)[0] = v[best];
    std::memcpy(to.data + 1, &best, sizeof best);
}

}  // namespace AscendC
