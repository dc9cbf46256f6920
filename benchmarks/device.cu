// Device functions that CuPy does not have.

// One thread waits by the clock of the GPU, so that the time does not depend on its
// frequency.
extern "C" __global__ void sleep_ns(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

// Normal numbers of deviation 1: splitmix64 of (seed, place), then Box-Muller.
extern "C" __global__ void normal(float* out, unsigned long long count,
                                  unsigned long long seed) {
    const unsigned long long i = blockIdx.x * 256ull + threadIdx.x;
    if (i >= count) {
        return;
    }
    unsigned long long z = (seed << 32) + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float unit = 5.9604645e-8f;  // 2^-24
    const float u = ((unsigned int)(z >> 40) + 1) * unit;  // in (0, 1]
    const float v = (unsigned int)(z & 0xFFFFFF) * unit;
    out[i] = sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

// Reads `count` times 16 bytes, eight a turn.
extern "C" __global__ void read_all(const uint4* data, unsigned long long count,
                                    unsigned int* found) {
    unsigned int all = 0;
    const unsigned long long stride = gridDim.x * 256ull;
    unsigned long long i = blockIdx.x * 256ull + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) v[n] = __ldcs(data + i + n * stride);
#pragma unroll
        for (int n = 0; n < 8; ++n) all ^= v[n].x ^ v[n].y ^ v[n].z ^ v[n].w;
    }
    if (all == 0x9E3779B9u) *found = all;  // so that the loads are not left out
}
