// row_pitch: bytes of shared memory from one packed row to the next, whose lanes then meet no bank conflicts; `pieces` of 16
// bytes are wanted of a row. pyllm/ops/product_tile.py counts alike.
//
//   PITCH_OF_WORDS(pieces)   where neighbouring lanes read words of different rows
//   PITCH_OF_PAIRS(pieces)   where they read pairs of words
#pragma once

#define PITCH_OF_WORDS(pieces) (((pieces) | 1) * 16)
#define PITCH_UP_TO(bytes, rest) ((bytes) + ((rest) + 128 - (bytes) % 128) % 128)
#define PITCH_OF_PAIRS(pieces)                                                            \
    (PITCH_UP_TO((pieces) * 16, 32) < PITCH_UP_TO((pieces) * 16, 96) ? PITCH_UP_TO((pieces) * 16, 32) \
                                                                     : PITCH_UP_TO((pieces) * 16, 96))
