// top_k: the TOP largest values of each row with their columns, in descending order; equal values by column
//
// Shapes    values [rows, columns] f32 (columns: ids [rows, columns] i32, or the column itself)
//           out_values [rows, parts, TOP] f32, out_ids alike i32
// Launch    grid (rows, parts), block (512): a block sorts one part of SORT elements; a second launch over the parts'
//           results gives those of the row
// Shared    SORT keys and columns, static
// Sync      bitonic network: a barrier after each exchange step
// Numerics  values are compared as they are; NaN is below everything and comes out as -infinity
// Defines   TOP, SORT (power of two), HAS_IDS
// Compile   TOP=64 SORT=2048 HAS_IDS=0,1
#include "common/platform.cuh"

// A key that sorts as the float does, NaN lowest.
DEVICE u32 order_key(float value) {
    if (value != value) return 0;
    const u32 bits = f32_bits(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float from_order_key(u32 key) {
    if (key == 0) return -INFINITY_F;
    return f32_from_bits(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

KERNEL(512) top_k(const float* RESTRICT values, const i32* RESTRICT ids, float* RESTRICT out_values,
                  i32* RESTRICT out_ids, i64 columns) {
    SHARED u32 keys[SORT];
    SHARED i32 names[SORT];
    const i64 first = static_cast<i64>(blockIdx.y) * SORT;
    const float* row = values + blockIdx.x * columns;
    for (i32 i = threadIdx.x; i < SORT; i += blockDim.x) {
        const i64 column = first + i;
        const bool inside = column < columns;
        keys[i] = inside ? order_key(row[column]) : 0;
#if HAS_IDS
        names[i] = inside ? ids[blockIdx.x * columns + column] : 0x7FFFFFFF;
#else
        names[i] = inside ? static_cast<i32>(column) : 0x7FFFFFFF;
#endif
    }
    BARRIER();
    for (i32 size = 2; size <= SORT; size *= 2) {
        for (i32 stride = size / 2; stride > 0; stride /= 2) {
            for (i32 i = threadIdx.x; i < SORT / 2; i += blockDim.x) {
                const i32 low = 2 * stride * (i / stride) + i % stride;
                const i32 high = low + stride;
                const bool descending = (low & size) == 0;
                const bool ordered = keys[low] > keys[high] || (keys[low] == keys[high] && names[low] < names[high]);
                if (ordered != descending) {
                    const u32 key = keys[low];
                    keys[low] = keys[high];
                    keys[high] = key;
                    const i32 name = names[low];
                    names[low] = names[high];
                    names[high] = name;
                }
            }
            BARRIER();
        }
    }
    const i64 target = (static_cast<i64>(blockIdx.x) * gridDim.y + blockIdx.y) * TOP;
    for (i32 i = threadIdx.x; i < TOP; i += blockDim.x) {
        out_values[target + i] = from_order_key(keys[i]);
        out_ids[target + i] = names[i];
    }
}
