// The packed scales of Q4_K and Q5_K: eight pairs of 6-bit scale and minimum in 12 bytes.
#pragma once

// Scale and minimum of sub-block j = 0..7.
DEVICE void k_scale_min(const u8* RESTRICT packed, i32 j, i32& scale, i32& minimum) {
    if (j < 4) {
        scale = packed[j] & 63;
        minimum = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
}
