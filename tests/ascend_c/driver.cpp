// Runs the kernel on the CPU, core after core.
#include STAND_IN_KERNEL
#include <cstdio>

uint32_t block_index, block_count;

void fail(const char *what, int line)
{
    std::fprintf(stderr, "kernel_operator.h:%d: %s\n", line, what);
    std::abort();
}

extern "C" void run(uint8_t **p, const uint32_t *sizes, uint32_t cores)
{
    MtpRejectionSampleTilingData tiling{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
    block_count = cores;
    for (block_index = 0; block_index < cores; ++block_index) {
        mtp_rejection_sample(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12],
                             nullptr, reinterpret_cast<uint8_t *>(&tiling));
    }
}
