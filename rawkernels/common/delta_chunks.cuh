// delta_chunks: what gated_delta_rule_couple leaves for gated_delta_rule_chunks
//
// With G the sum of a chunk's log decays up to a token and D_ij = exp(G_i - G_j) for j <= i, for each value head
//
//     T = (I + strictly lower part of (beta_i K_i.K_j D_ij))^-1 diag(beta);   P = (Q_i.K_j D_ij) / sqrt(HEAD_DIM)
//
// scratch [slots,slot_size] f32: chunk c of sequence s is in slot cu_seqlens[s] / CHUNK + s + c < T / CHUNK + S, with
//     f16 [num_k, 4, CHUNK, HEAD_DIM]: SCALE K and what rounding it left out, SCALE Q likewise
//     f16 [num_v, 4, CHUNK, CHUNK]: SCALE T and SCALE P likewise
//     f32 [num_v, 2, CHUNK]: e^G, e^(G_last - G)
// Places behind a sequence's last token are as if q, k, g and beta were 0 there.
#pragma once
#include "common/delta.cuh"
#include "common/tile.cuh"

#define CHUNK 32
#define TOKEN_TILES (CHUNK / 16)
#define KEY_TILES (HEAD_DIM / 16)
#define KEY_LD (HEAD_DIM + 8)  // of keys in shared memory
#define SCALE 256.0f           // of factors that are at most 1: what rounding leaves out of them is no subnormal number

#define KEYS (4 * CHUNK * HEAD_DIM)  // f16 of a key head
#define PAIRS (4 * CHUNK * CHUNK)    // f16 of a value head
#define GATES (2 * CHUNK)            // f32 of a value head

DEVICE f16* keys_of(float* slot, i32 key_head) { return reinterpret_cast<f16*>(slot) + key_head * KEYS; }

DEVICE f16* pairs_of(float* slot, i32 num_k, i32 head) {
    return reinterpret_cast<f16*>(slot) + num_k * KEYS + head * PAIRS;
}

DEVICE float* gates_of(float* slot, i32 num_k, i32 num_v, i32 head) {
    return slot + (num_k * KEYS + num_v * PAIRS) / 2 + head * GATES;
}
