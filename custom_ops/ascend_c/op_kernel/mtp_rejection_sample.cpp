// Rejection sampling on the vector cores: what custom_ops/rejection.py says, in float32.
//
// A core takes whole slots and walks their rows in order, as far as drafts are accepted.
#include "mtp_rejection_sample_passes.h"

constexpr float GREEDY_BELOW = 1e-5f;

class MtpRejectionSample : private RowPasses {
public:
    __aicore__ inline void Init(GM_ADDR const *inputs, GM_ADDR tokens, GM_ADDR accepted,
                                const MtpRejectionSampleTilingData &tiling, TPipe *pipe)
    {
        slots = tiling.slots;
        rows = tiling.rows;
        Setup(inputs[0], inputs[9], inputs[10], tiling, pipe);
        draftIdsGm.SetGlobalBuffer((__gm__ int32_t *)inputs[1]);
        numDraftsGm.SetGlobalBuffer((__gm__ int32_t *)inputs[2]);
        acceptGm.SetGlobalBuffer((__gm__ float *)inputs[3]);
        pickGm.SetGlobalBuffer((__gm__ float *)inputs[4]);
        temperatureGm.SetGlobalBuffer((__gm__ float *)inputs[5]);
        topKGm.SetGlobalBuffer((__gm__ int32_t *)inputs[6]);
        topPGm.SetGlobalBuffer((__gm__ float *)inputs[7]);
        bannedRowsGm.SetGlobalBuffer((__gm__ int32_t *)inputs[8]);
        tokensGm.SetGlobalBuffer((__gm__ int32_t *)tokens);
        acceptedGm.SetGlobalBuffer((__gm__ int32_t *)accepted);
        pipe->InitBuffer(outBuffer, (AlignUp(rows, BLOCK) + BLOCK) * sizeof(int32_t));
        out = outBuffer.Get<int32_t>();
    }

    __aicore__ inline void Process()
    {
        for (uint32_t slot = GetBlockIdx(); slot < slots; slot += GetBlockNum()) {
            Slot(slot);
        }
    }

private:
    __aicore__ inline void Slot(uint32_t slot)
    {
        const uint32_t drafts = rows - 1;
        int32_t count = numDraftsGm.GetValue(slot);
        if (count > static_cast<int32_t>(drafts)) {
            count = drafts;
        }
        int32_t taken = 0;
        int32_t token = -1;
        while (true) {
            int32_t draft = taken < count ? draftIdsGm.GetValue(slot * drafts + taken) : -1;
            if (draft >= static_cast<int32_t>(vocabulary)) {
                draft = -1;
            }
            if (!Verify(slot, taken, draft, token)) {
                break;
            }
            ++taken;
        }
        Write(slot, taken, token);
    }

    // Whether the draft of a row is kept; where not, `token` is what replaces it.
    __aicore__ inline bool Verify(uint32_t slot, uint32_t index, int32_t draft, int32_t &token)
    {
        Row row;
        row.logits = (static_cast<uint64_t>(slot) * rows + index) * vocabulary;
        row.law = (static_cast<uint64_t>(slot) * (rows - 1) + index) * vocabulary;
        row.banned = static_cast<int32_t>(index) < bannedRowsGm.GetValue(slot);
        row.removed = -1;
        row.share = 0.0f;
        row.cut = NegativeInfinity();
        row.cutId = vocabulary;
        row.slot = slot;
        if (!Top(row)) {
            token = -1;
            return false;
        }
        const float temperature = temperatureGm.GetValue(slot);
        if (temperature <= GREEDY_BELOW) {
            token = row.best;
            return draft == row.best;
        }
        row.inverseHeat = 1.0f / temperature;
        const int32_t topK = topKGm.GetValue(slot);
        const float topP = topPGm.GetValue(slot);
        if (topK > 0) {
            CutByCount(row, topK);
        }
        float mass = Mass(row);
        if (topP < 1.0f) {
            mass = CutByMass(row, topP * mass);
        }
        if (draft >= 0) {
            const float law = hasLaws ? lawsGm.GetValue(row.law + draft) : 1.0f;
            const float uniform = acceptGm.GetValue(slot * (rows - 1) + index);
            if (law > 0.0f && uniform * law < Weight(row, draft) / mass) {
                return true;
            }
            row.removed = hasLaws ? -1 : draft;
            row.share = hasLaws ? mass : 0.0f;
        }
        token = Pick(row, pickGm.GetValue(slot * rows + index), topK > 0 || topP < 1.0f);
        return false;
    }

    // Keep the `k` largest logits.
    __aicore__ inline void CutByCount(Row &row, int32_t k)
    {
        const float limit = static_cast<float>(k);
        if (Pass(row, Where::ABOVE, NegativeInfinity(), true) <= limit) {
            return;
        }
        const float edge = Edge(row, limit, true, true);
        const float left = limit - Pass(row, Where::ABOVE, edge, true);
        row.cutId = Scan(row, Where::EQUAL, edge, left, true, true);
        row.cut = edge;
    }

    // Keep the shortest descending prefix that weighs at least `least`; its weight is returned.
    __aicore__ inline float CutByMass(Row &row, float least)
    {
        const float edge = Edge(row, least, true, false);
        const float left = least - Pass(row, Where::ABOVE, edge, false);
        row.cutId = Scan(row, Where::EQUAL, edge, left, true, false);
        row.cut = edge;
        return Mass(row);
    }

    // Inverse CDF over what is left of the row, in its own order.
    __aicore__ inline int32_t Pick(Row &row, float uniform, bool descending)
    {
        float total = Mass(row);
        if (!(total > 0.0f && total < FromBits(0x7F800000))) {
            row.removed = -1;
            row.share = 0.0f;
            total = Mass(row);
        }
        const float point = (uniform < BELOW_ONE ? uniform : BELOW_ONE) * total;
        if (!descending) {
            return Scan(row, Where::ALL, 0.0f, point, false, false);
        }
        const float edge = Edge(row, point, false, false);
        const float left = point - Pass(row, Where::ABOVE, edge, false);
        return Scan(row, Where::EQUAL, edge, left, false, false);
    }

    __aicore__ inline void Write(uint32_t slot, int32_t taken, int32_t token)
    {
        const uint32_t drafts = rows - 1;
        const uint32_t after = AlignUp(rows, BLOCK);
        for (int32_t i = 0; i < static_cast<int32_t>(rows); ++i) {
            const int32_t rest = i == taken ? token : -1;
            out.SetValue(i, i < taken ? draftIdsGm.GetValue(slot * drafts + i) : rest);
        }
        out.SetValue(after, taken);
#if __CCE_AICORE__ >= 220
        const uint32_t size = rows * sizeof(int32_t);
        Sync<HardEvent::S_MTE3>();
        DataCopyPad(tokensGm[slot * rows], out, DataCopyExtParams{1, size, 0, 0, 0});
        DataCopyPad(acceptedGm[slot], out[after], DataCopyExtParams{1, sizeof(int32_t), 0, 0, 0});
        Sync<HardEvent::MTE3_S>();
#else
        // No copy of single bytes here: one core writes all slots through its data cache.
        for (uint32_t i = 0; i < rows; ++i) {
            tokensGm.SetValue(slot * rows + i, out.GetValue(i));
        }
        acceptedGm.SetValue(slot, taken);
        DataCacheCleanAndInvalid<int32_t, CacheLine::ENTIRE_DATA_CACHE>(tokensGm);
        DataCacheCleanAndInvalid<int32_t, CacheLine::ENTIRE_DATA_CACHE>(acceptedGm);
#endif
    }

    uint32_t slots, rows;
    GlobalTensor<float> acceptGm, pickGm, temperatureGm, topPGm;
    GlobalTensor<int32_t> draftIdsGm, numDraftsGm, topKGm, bannedRowsGm, tokensGm, acceptedGm;
    TBuf<TPosition::VECCALC> outBuffer;
    LocalTensor<int32_t> out;
};

extern "C" __global__ __aicore__ void mtp_rejection_sample(
    GM_ADDR logits, GM_ADDR draft_ids, GM_ADDR num_drafts, GM_ADDR accept_uniforms,
    GM_ADDR pick_uniforms, GM_ADDR temperature, GM_ADDR top_k, GM_ADDR top_p, GM_ADDR banned_rows,
    GM_ADDR stop_ids, GM_ADDR draft_probs, GM_ADDR tokens, GM_ADDR num_accepted_drafts,
    GM_ADDR workspace, GM_ADDR tiling)
{
    GET_TILING_DATA(data, tiling);
    GM_ADDR inputs[] = {logits, draft_ids, num_drafts, accept_uniforms, pick_uniforms,
                        temperature, top_k, top_p, banned_rows, stop_ids, draft_probs};
    TPipe pipe;
    MtpRejectionSample op;
    op.Init(inputs, tokens, num_accepted_drafts, data, &pipe);
    op.Process();
}
