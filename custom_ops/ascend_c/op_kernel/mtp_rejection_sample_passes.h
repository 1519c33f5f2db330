// Passes over one row of logits in tiles: masked sums, counts and scans.
//
// Every pass sums tile by tile, so a running sum never has more terms than tiles. There is no
// sort: a descending walk with ties to the lower id is a threshold, found by bisection over the
// ordered bits of float32, and a scan of its ties.
#ifndef MTP_REJECTION_SAMPLE_PASSES_H
#define MTP_REJECTION_SAMPLE_PASSES_H

#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t TILE = 4096;
constexpr uint32_t MAX_TILES = 256;
constexpr uint32_t LANES = 64;  // float32 values of one vector repeat
constexpr uint32_t BLOCK = 8;   // float32 values of 32 bytes
constexpr float BELOW_ONE = 0.99999994f;  // 1 - 2^-24

enum class Where { ALL, AT_LEAST, ABOVE, EQUAL };

__aicore__ inline float FromBits(int32_t bits)
{
    return *reinterpret_cast<float *>(&bits);
}

__aicore__ inline float NegativeInfinity()
{
    return FromBits(static_cast<int32_t>(0xFF800000));
}

// Integers in the order of the floats they stand for, and back.
__aicore__ inline int64_t ToKey(float value)
{
    int32_t bits = *reinterpret_cast<int32_t *>(&value);
    return bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
}

__aicore__ inline float FromKey(int64_t key)
{
    int32_t bits = static_cast<int32_t>(key);
    return FromBits(bits >= 0 ? bits : bits ^ 0x7FFFFFFF);
}

template <HardEvent event>
__aicore__ inline void Sync()
{
    event_t id = static_cast<event_t>(GetTPipePtr()->FetchEventID(event));
    SetFlag<event>(id);
    WaitFlag<event>(id);
}

struct Row {
    uint32_t slot;
    uint64_t logits;    // offset of the row
    uint64_t law;       // offset of the draft law
    bool banned;        // the stop ids are out
    float top;          // the largest logit
    int32_t best;       // its id
    float inverseHeat;  // 1 / temperature
    float cut;          // tokens below this logit are out,
    int32_t cutId;      // and those at it with a higher id
    int32_t removed;    // this id weighs nothing; -1 for none
    float share;        // the law times this is taken from the weights; 0 for none
};

class RowPasses {
protected:
    __aicore__ inline void Setup(GM_ADDR logits, GM_ADDR stopIds, GM_ADDR laws,
                                 const MtpRejectionSampleTilingData &tiling, TPipe *pipe)
    {
        vocabulary = tiling.vocabulary;
        stops = tiling.stops;
        hasLaws = tiling.hasLaws != 0;
        tiles = (vocabulary + TILE - 1) / TILE;
        logitsGm.SetGlobalBuffer((__gm__ float *)logits);
        stopIdsGm.SetGlobalBuffer((__gm__ int32_t *)stopIds);
        lawsGm.SetGlobalBuffer((__gm__ float *)laws);
        pipe->InitBuffer(logitsQueue, 2, TILE * sizeof(float));
        if (hasLaws) {
            pipe->InitBuffer(lawQueue, 2, TILE * sizeof(float));
        }
        pipe->InitBuffer(weightBuffer, TILE * sizeof(float));
        pipe->InitBuffer(tiesBuffer, TILE * sizeof(float));
        pipe->InitBuffer(rampBuffer, TILE * sizeof(float));
        pipe->InitBuffer(maskBuffer, TILE / 8);
        pipe->InitBuffer(workBuffer, TILE / 2 * sizeof(float));
        pipe->InitBuffer(sumBuffer, 2 * MAX_TILES * BLOCK * sizeof(float));
        weights = weightBuffer.Get<float>();
        ties = tiesBuffer.Get<float>();
        ramp = rampBuffer.Get<float>();
        mask = maskBuffer.Get<uint8_t>();
        work = workBuffer.Get<float>();
        sums = sumBuffer.Get<float>();
        FillRamp();
    }

    __aicore__ inline uint32_t AlignUp(uint32_t value, uint32_t to)
    {
        return (value + to - 1) / to * to;
    }

    // 0, 1, 2, ... : places inside a tile.
    __aicore__ inline void FillRamp()
    {
        for (uint32_t i = 0; i < LANES; ++i) {
            ramp.SetValue(i, static_cast<float>(i));
        }
        Sync<HardEvent::S_V>();
        for (uint32_t n = LANES; n < TILE; n *= 2) {
            Adds(ramp[n], ramp, static_cast<float>(n), n);
            PipeBarrier<PIPE_V>();
        }
    }

    // The largest logit and its first id; false where the row has no law.
    __aicore__ inline bool Top(Row &row)
    {
        for (uint32_t tile = 0; tile < tiles; ++tile) {
            const uint32_t width = Width(tile);
            LocalTensor<float> x = Load(row, tile);
            // Neither infinity nor what is not a number is below infinity.
            CompareScalar(mask, x, FromBits(0x7F800000), CMPMODE::LT, width);
            PipeBarrier<PIPE_V>();
            Duplicate(weights, 1.0f, width);
            PipeBarrier<PIPE_V>();
            Select(weights, mask, weights, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, width);
            PipeBarrier<PIPE_V>();
            ReduceSum<float>(sums[tile * BLOCK], weights, work, width);
            PipeBarrier<PIPE_V>();
            ReduceMax<float>(sums[(MAX_TILES + tile) * BLOCK], x, work, width, true);
            PipeBarrier<PIPE_V>();
            logitsQueue.FreeTensor(x);
        }
        Sync<HardEvent::V_S>();
        row.top = NegativeInfinity();
        row.best = 0;
        bool whole = true;
        for (uint32_t tile = 0; tile < tiles; ++tile) {
            whole = whole && sums.GetValue(tile * BLOCK) == static_cast<float>(Width(tile));
            const uint32_t at = (MAX_TILES + tile) * BLOCK;
            const float value = sums.GetValue(at);
            if (value > row.top) {
                row.top = value;
                row.best = tile * TILE + sums.ReinterpretCast<uint32_t>().GetValue(at + 1);
            }
        }
        return whole && row.top > NegativeInfinity();
    }

    // The largest logit from which on the weights exceed `point`, or reach it.
    __aicore__ inline float Edge(const Row &row, float point, bool reach, bool unit)
    {
        int64_t low = ToKey(NegativeInfinity());
        int64_t high = ToKey(row.top) + 1;
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            const float sum = Pass(row, Where::AT_LEAST, FromKey(middle), unit);
            (sum > point || (reach && sum == point) ? low : high) = middle;
        }
        return FromKey(low);
    }

    // The first id at which the sum over ids exceeds `point`, or reaches it; never one that weighs
    // nothing. Where rounding leaves more to find than there is, the last that weighs something.
    __aicore__ inline int32_t Scan(const Row &row, Where where, float edge, float point, bool reach,
                                   bool unit)
    {
        Pass(row, where, edge, unit);
        float ahead = 0.0f;
        float before = 0.0f;
        uint32_t found = 0;
        for (uint32_t tile = 0; tile < tiles; ++tile) {
            const float sum = sums.GetValue(tile * BLOCK);
            if (sum > 0.0f) {
                found = tile;
                before = ahead;
                ahead += sum;
                if (ahead > point || (reach && ahead == point)) {
                    break;
                }
            }
        }
        Weigh(row, found, where, edge, unit);
        Sync<HardEvent::V_S>();
        int32_t id = 0;
        float inner = 0.0f;
        float part = 0.0f;  // two levels again, LANES terms each
        point -= before;
        for (uint32_t i = 0; i < Width(found); ++i) {
            if (i % LANES == 0) {
                inner += part;
                part = 0.0f;
            }
            const float weight = weights.GetValue(i);
            if (weight > 0.0f) {
                id = found * TILE + i;
                part += weight;
                if (inner + part > point || (reach && inner + part == point)) {
                    break;
                }
            }
        }
        Sync<HardEvent::S_V>();
        return id;
    }

    __aicore__ inline float Mass(const Row &row)
    {
        return Pass(row, Where::ALL, 0.0f, false);
    }

    // Sum the weights of a row (or count its tokens) and leave the sum of each tile in `sums`.
    __aicore__ inline float Pass(const Row &row, Where where, float edge, bool unit)
    {
        for (uint32_t tile = 0; tile < tiles; ++tile) {
            Weigh(row, tile, where, edge, unit);
            ReduceSum<float>(sums[tile * BLOCK], weights, work, Width(tile));
            PipeBarrier<PIPE_V>();
        }
        Sync<HardEvent::V_S>();
        float total = 0.0f;
        for (uint32_t tile = 0; tile < tiles; ++tile) {
            total += sums.GetValue(tile * BLOCK);
        }
        Sync<HardEvent::S_V>();
        return total;
    }

    // Leave the weights of a tile in `weights`: zero where cut, removed or masked.
    __aicore__ inline void Weigh(const Row &row, uint32_t tile, Where where, float edge, bool unit)
    {
        const uint32_t width = Width(tile);
        LocalTensor<float> x = Load(row, tile);
        if (unit) {
            Duplicate(weights, 1.0f, width);
        } else {
            Adds(weights, x, -row.top, width);
            PipeBarrier<PIPE_V>();
            Muls(weights, weights, row.inverseHeat, width);
            PipeBarrier<PIPE_V>();
            Exp(weights, weights, width);
        }
        PipeBarrier<PIPE_V>();
        Keep(x, row.cut, CMPMODE::EQ, ties, weights, width);
        Keep(ramp, static_cast<float>(row.cutId) - static_cast<float>(tile * TILE), CMPMODE::LE, ties,
             ties, width);
        Keep(x, row.cut, CMPMODE::GT, weights, weights, width);
        Add(weights, weights, ties, width);
        PipeBarrier<PIPE_V>();
        if (row.share > 0.0f) {
            TakeLaw(row, tile);
        }
        if (where == Where::AT_LEAST) {
            Keep(x, edge, CMPMODE::GE, weights, weights, width);
        } else if (where == Where::ABOVE) {
            Keep(x, edge, CMPMODE::GT, weights, weights, width);
        } else if (where == Where::EQUAL) {
            Keep(x, edge, CMPMODE::EQ, weights, weights, width);
        }
        logitsQueue.FreeTensor(x);
    }

    // to = from where `values` compare so, else 0.
    __aicore__ inline void Keep(const LocalTensor<float> &values, float edge, CMPMODE mode,
                                const LocalTensor<float> &to, const LocalTensor<float> &from,
                                uint32_t width)
    {
        CompareScalar(mask, values, edge, mode, width);
        PipeBarrier<PIPE_V>();
        Select(to, mask, from, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, width);
        PipeBarrier<PIPE_V>();
    }

    // max(w - q * mass, 0)
    __aicore__ inline void TakeLaw(const Row &row, uint32_t tile)
    {
        const uint32_t real = Real(tile);
        LocalTensor<float> fresh = lawQueue.AllocTensor<float>();
        DataCopy(fresh, lawsGm[row.law + static_cast<uint64_t>(tile) * TILE], real);
        lawQueue.EnQue(fresh);
        LocalTensor<float> law = lawQueue.DeQue<float>();
        Muls(law, law, row.share, real);
        PipeBarrier<PIPE_V>();
        Sub(weights, weights, law, real);
        PipeBarrier<PIPE_V>();
        Maxs(weights, weights, 0.0f, real);
        PipeBarrier<PIPE_V>();
        lawQueue.FreeTensor(law);
    }

    // Logits of a tile with the bans applied, padded by minus infinity to whole repeats.
    __aicore__ inline LocalTensor<float> Load(const Row &row, uint32_t tile)
    {
        const uint32_t real = Real(tile);
        const int32_t start = tile * TILE;
        LocalTensor<float> fresh = logitsQueue.AllocTensor<float>();
        DataCopy(fresh, logitsGm[row.logits + start], real);
        logitsQueue.EnQue(fresh);
        LocalTensor<float> x = logitsQueue.DeQue<float>();
        if (Width(tile) > real) {
            Duplicate(x[real], NegativeInfinity(), Width(tile) - real);
            PipeBarrier<PIPE_V>();
        }
        if (row.banned) {
            for (uint32_t i = 0; i < stops; ++i) {
                Ban(x, stopIdsGm.GetValue(row.slot * stops + i) - start, real);
            }
        }
        Ban(x, row.removed < 0 ? -1 : row.removed - start, real);
        return x;
    }

    __aicore__ inline void Ban(const LocalTensor<float> &x, int32_t place, uint32_t real)
    {
        if (place < 0 || place >= static_cast<int32_t>(real)) {
            return;
        }
        Sync<HardEvent::MTE2_S>();
        Sync<HardEvent::V_S>();
        x.SetValue(place, x.GetValue(place) + NegativeInfinity());
        Sync<HardEvent::S_V>();
    }

    // The weight of one token.
    __aicore__ inline float Weight(const Row &row, int32_t id)
    {
        float logit = logitsGm.GetValue(row.logits + id);
        for (uint32_t i = 0; row.banned && i < stops; ++i) {
            if (stopIdsGm.GetValue(row.slot * stops + i) == id) {
                logit = NegativeInfinity();
            }
        }
        if (!(logit > row.cut || (logit == row.cut && id <= row.cutId))) {
            return 0.0f;
        }
        Duplicate(weights, (logit - row.top) * row.inverseHeat, LANES);
        PipeBarrier<PIPE_V>();
        Exp(weights, weights, LANES);
        Sync<HardEvent::V_S>();
        const float weight = weights.GetValue(0);
        Sync<HardEvent::S_V>();
        return weight;
    }

    // Tokens of a tile; a multiple of BLOCK, as the vocabulary is.
    __aicore__ inline uint32_t Real(uint32_t tile)
    {
        return tile + 1 < tiles ? TILE : vocabulary - tile * TILE;
    }

    __aicore__ inline uint32_t Width(uint32_t tile)
    {
        return AlignUp(Real(tile), LANES);
    }

    uint32_t vocabulary, stops, tiles;
    bool hasLaws;
    GlobalTensor<float> logitsGm, lawsGm;
    GlobalTensor<int32_t> stopIdsGm;
    TQue<TPosition::VECIN, 2> logitsQueue, lawQueue;
    TBuf<TPosition::VECCALC> weightBuffer, tiesBuffer, rampBuffer, maskBuffer, workBuffer;
    TBuf<TPosition::VECCALC> sumBuffer;
    LocalTensor<float> weights, ties, ramp, work, sums;
    LocalTensor<uint8_t> mask;
};

#endif
