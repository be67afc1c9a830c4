// route: the softmax of each row of logits, its num_used largest values and where they are, scaled to sum to 1
//
// Shapes    logits [T,num_experts] f32; experts [T,num_used] i32; weights [T,num_used] f32; num_experts <= 512
// Launch    grid (ceil(T / warps)), block (128): one warp per token
// Sync      none but warp exchanges
// Numerics  f32; of equal probabilities the lower index comes first; a NaN comes last, and makes the weights NaN
#include "common/platform.cuh"

constexpr int MAX_EXPERTS = 512;
constexpr int OWN = MAX_EXPERTS / WARP_SIZE;  // of a lane: experts lane, lane + WARP_SIZE, ...
constexpr float SMALLEST_SUM = 6.103515625e-5f;

KERNEL(128) route(const float* RESTRICT logits, i32* RESTRICT experts, float* RESTRICT weights, i32 T,
                  i32 num_experts, i32 num_used) {
    const i64 t = blockIdx.x * (128 / WARP_SIZE) + WARP_ID();
    if (t >= T) return;  // whole warps only
    const float* row = logits + t * num_experts;
    float value[OWN];  // an expert that does not exist is below all others
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
        const bool exists = j * WARP_SIZE + LANE() < num_experts;
        value[j] = exists ? expf(value[j] - largest) : 0;
        sum += value[j];
    }
    sum = warp_sum(sum);
    float key[OWN];  // what is compared: probabilities, less than 0 for a NaN, still less for what cannot be chosen
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        value[j] = value[j] / sum;
        key[j] = j * WARP_SIZE + LANE() >= num_experts ? -2.0f : value[j] >= 0 ? value[j] : -1.0f;
    }
    float chosen = 0;
    for (i32 slot = 0; slot < num_used; slot++) {
        float best = -3.0f, probability = 0;
        i32 expert = MAX_EXPERTS;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            if (key[j] > best) best = key[j], probability = value[j], expert = j * WARP_SIZE + LANE();
        }
#pragma unroll
        for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) {
            const float other = shfl_xor(best, mask), its_probability = shfl_xor(probability, mask);
            const i32 its_expert = shfl_xor(expert, mask);
            if (other > best || (other == best && its_expert < expert)) {
                best = other, probability = its_probability, expert = its_expert;
            }
        }
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            if (j * WARP_SIZE + LANE() == expert) key[j] = -3.0f;
        }
        chosen += probability;
        if (LANE() == 0) {
            experts[t * num_used + slot] = expert;
            weights[t * num_used + slot] = probability;
        }
    }
    const float scale = chosen < SMALLEST_SUM ? SMALLEST_SUM : chosen;  // a NaN stays one
    if (LANE() == 0) {
        for (i32 slot = 0; slot < num_used; slot++) weights[t * num_used + slot] /= scale;
    }
}
