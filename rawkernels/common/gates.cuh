// gated: activation(gate) * up
//
// Defines   GATE 1: silu; 2: gelu in its tanh form
#pragma once
#include "common/platform.cuh"

DEVICE float gated(float gate, float up) {
#if GATE == 1
    return gate / (1 + expf(-gate)) * up;
#else
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);  // sqrt(2/pi)
    return 0.5f * gate * (1 + tanhf(inner)) * up;
#endif
}
