// route: the softmax of each row of logits, its num_used largest values and where they are, scaled to sum to 1
//
// Shapes    logits [T,num_experts] f32; experts [T,num_used] i32; weights [T,num_used] f32
// Launch    grid (ceil(T / warps)), block (128): one warp per token
// Sync      none but warp exchanges
// Numerics  f32; of equal probabilities the lower index comes first; a NaN comes last, and makes the weights NaN
// Defines   OWN: experts of a lane; num_experts <= OWN * WARP_SIZE
// Compile   OWN=1,4,16
#include "common/platform.cuh"

constexpr float SMALLEST_SUM = 6.103515625e-5f;

// What is compared: the bits of a probability, which is not negative, plus 2; 1 for a NaN; 0 for what cannot be chosen.
DEVICE u32 key_of(float probability) { return probability >= 0 ? f32_bits(probability) + 2 : 1; }
DEVICE float probability_of(u32 key) { return key < 2 ? NAN_F : f32_from_bits(key - 2); }

KERNEL(128) route(const float* RESTRICT logits, i32* RESTRICT experts, float* RESTRICT weights, i32 T,
                  i32 num_experts, i32 num_used) {
    GRID_DEPENDENCY();
    const i64 t = blockIdx.x * (128 / WARP_SIZE) + WARP_ID();
    if (t >= T) return;  // whole warps only
    const float* row = logits + t * num_experts;
    float value[OWN];  // of experts lane, lane + WARP_SIZE, ...
    float largest = -INFINITY_F;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int expert = j * WARP_SIZE + LANE();
        value[j] = expert < num_experts ? row[expert] : -INFINITY_F;
        largest = fmaxf(largest, value[j]);
    }
    largest = warp_max(largest);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        value[j] = j * WARP_SIZE + LANE() < num_experts ? expf(value[j] - largest) : 0;
        sum += value[j];
    }
    sum = warp_sum(sum);
    u32 key[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++) key[j] = j * WARP_SIZE + LANE() < num_experts ? key_of(value[j] / sum) : 0;
    float chosen = 0;
    for (i32 slot = 0; slot < num_used; slot++) {
        u32 best = 0;
#pragma unroll
        for (int j = 0; j < OWN; j++) best = max(best, key[j]);
        best = warp_max_u32(best);
        u32 expert = ~0u;
#pragma unroll
        for (int j = OWN - 1; j >= 0; j--) {
            if (key[j] == best) expert = j * WARP_SIZE + LANE();
        }
        expert = warp_min_u32(expert);
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            if (j * WARP_SIZE + LANE() == expert) key[j] = 0;
        }
        const float probability = probability_of(best);
        chosen += probability;
        if (LANE() == 0) {
            experts[t * num_used + slot] = static_cast<i32>(expert);
            weights[t * num_used + slot] = probability;
        }
    }
    const float scale = chosen < SMALLEST_SUM ? SMALLEST_SUM : chosen;  // a NaN stays one
    if (LANE() == 0) {
        for (i32 slot = 0; slot < num_used; slot++) weights[t * num_used + slot] /= scale;
    }
}
