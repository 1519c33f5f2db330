// Host side of MtpRejectionSample: prototype, shapes, tiling.
#include "mtp_rejection_sample_tiling.h"

#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace {
constexpr size_t LOGITS = 0;
constexpr size_t STOP_IDS = 9;
constexpr size_t DRAFT_PROBS = 10;
constexpr int64_t BLOCK = 8;                     // float32 values of 32 bytes
constexpr int64_t MAX_VOCABULARY = 256 * 4096;   // tiles by tokens of the kernel
}  // namespace

namespace optiling {
static ge::graphStatus Tiling(gert::TilingContext *context)
{
    const gert::Shape logits = context->GetInputShape(LOGITS)->GetStorageShape();
    const gert::Shape stops = context->GetInputShape(STOP_IDS)->GetStorageShape();
    if (logits.GetDimNum() != 3 || stops.GetDimNum() != 2) {
        return ge::GRAPH_FAILED;
    }
    const int64_t slots = logits.GetDim(0);
    const int64_t rows = logits.GetDim(1);
    const int64_t vocabulary = logits.GetDim(2);
    // Rows are copied in blocks of 32 bytes.
    if (slots < 1 || rows < 1 || vocabulary < BLOCK || vocabulary % BLOCK != 0 ||
        vocabulary > MAX_VOCABULARY) {
        return ge::GRAPH_FAILED;
    }
    auto platform = platform_ascendc::PlatformAscendC(context->GetPlatformInfo());
    // Ascend 310P has no copy of single bytes: two cores must not write to one cache line.
    const bool alone = platform.GetSocVersion() == platform_ascendc::SocVersion::ASCEND310P;
    const int64_t cores = alone ? 1 : platform.GetCoreNumAiv();
    context->SetBlockDim(static_cast<uint32_t>(slots < cores ? slots : cores));

    MtpRejectionSampleTilingData tiling;
    tiling.set_slots(static_cast<uint32_t>(slots));
    tiling.set_rows(static_cast<uint32_t>(rows));
    tiling.set_vocabulary(static_cast<uint32_t>(vocabulary));
    tiling.set_stops(static_cast<uint32_t>(stops.GetDim(1)));
    tiling.set_hasLaws(context->GetOptionalInputShape(DRAFT_PROBS) != nullptr ? 1 : 0);
    tiling.SaveToBuffer(context->GetRawTilingData()->GetData(),
                        context->GetRawTilingData()->GetCapacity());
    context->GetRawTilingData()->SetDataSize(tiling.GetDataSize());
    context->GetWorkspaceSizes(1)[0] = platform.GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}
}  // namespace optiling

namespace ge {
static graphStatus InferShape(gert::InferShapeContext *context)
{
    const gert::Shape *logits = context->GetInputShape(LOGITS);
    gert::Shape *tokens = context->GetOutputShape(0);
    gert::Shape *accepted = context->GetOutputShape(1);
    tokens->SetDimNum(2);
    tokens->SetDim(0, logits->GetDim(0));
    tokens->SetDim(1, logits->GetDim(1));
    accepted->SetDimNum(1);
    accepted->SetDim(0, logits->GetDim(0));
    return GRAPH_SUCCESS;
}

static graphStatus InferDataType(gert::InferDataTypeContext *context)
{
    context->SetOutputDataType(0, DT_INT32);
    context->SetOutputDataType(1, DT_INT32);
    return GRAPH_SUCCESS;
}
}  // namespace ge

namespace ops {
class MtpRejectionSample : public OpDef {
public:
    explicit MtpRejectionSample(const char *name) : OpDef(name)
    {
        this->Input("logits")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("draft_ids")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("num_drafts")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("accept_uniforms")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("pick_uniforms")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("temperature")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("top_k")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("top_p")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("banned_rows")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("stop_ids")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Input("draft_probs")
            .ParamType(OPTIONAL)
            .DataType({ge::DT_FLOAT})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Output("tokens")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->Output("num_accepted_drafts")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT32})
            .Format({ge::FORMAT_ND})
            .UnknownShapeFormat({ge::FORMAT_ND});
        this->SetInferShape(ge::InferShape).SetInferDataType(ge::InferDataType);
        this->AICore().SetTiling(optiling::Tiling);
        this->AICore().AddConfig("ascend910b");
        this->AICore().AddConfig("ascend910_93");
        this->AICore().AddConfig("ascend310p");
    }
};

OP_ADD(MtpRejectionSample);
}  // namespace ops
