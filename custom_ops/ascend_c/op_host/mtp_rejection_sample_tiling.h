// What the host tells every core of MtpRejectionSample.
#ifndef MTP_REJECTION_SAMPLE_TILING_H
#define MTP_REJECTION_SAMPLE_TILING_H

#include "register/tilingdata_base.h"

namespace optiling {
BEGIN_TILING_DATA_DEF(MtpRejectionSampleTilingData)
TILING_DATA_FIELD_DEF(uint32_t, slots);       // B
TILING_DATA_FIELD_DEF(uint32_t, rows);        // R = K + 1
TILING_DATA_FIELD_DEF(uint32_t, vocabulary);  // V
TILING_DATA_FIELD_DEF(uint32_t, stops);       // S
TILING_DATA_FIELD_DEF(uint32_t, hasLaws);     // whether draft_probs is there
END_TILING_DATA_DEF;

REGISTER_TILING_DATA_CLASS(MtpRejectionSample, MtpRejectionSampleTilingData)
}  // namespace optiling

#endif
