// emulation: what an emulated kernel and the runtime that runs it (pyllm/device/emulation) agree on.
//
// One launch runs at a time in a process, and a thread of a block gives way only inside `barrier` and `exchange`.
#pragma once

struct EmulatedIndex {
    unsigned x, y, z;
};

enum EmulatedFault : int {
    FAULT_NONE = 0,
    FAULT_BARRIER = 1,         // threads wait at a barrier or exchange that the others never reach
    FAULT_EXCHANGE = 2,        // lanes of a warp meet at different kinds of exchange
    FAULT_MISALIGNED = 3,      // load16 or store16 of an address that is no multiple of 16
    FAULT_MEMORY = 4,          // an address that does not exist
    FAULT_STACK = 5,           // a thread's stack is full
    FAULT_SHARED = 6,          // written behind the dynamic shared memory
    FAULT_ARITHMETIC = 7,      // an integer divided by zero
    FAULT_RESOURCES = 8,       // the host has no memory for the threads' stacks
};

enum EmulatedExchange : int {
    EXCHANGE_SHUFFLE,
    EXCHANGE_BALLOT,
    EXCHANGE_BARRIER,
    EXCHANGE_TILE_LOAD,
    EXCHANGE_TILE,
};

constexpr int EXCHANGE_BYTES = 128;  // most that a lane can show to the others: two rows of 16 floats

struct Emulation {
    EmulatedIndex thread_index, block_index, block_extent, grid_extent;
    int lane;               // of the running thread
    unsigned char* slots;   // [lanes][EXCHANGE_BYTES] of its warp, for its next exchange
    unsigned char* dynamic_shared;

    void (*barrier)();
    // Returns when all live lanes of the warp have come, with the set of those lanes. What they wrote to `slots` (the
    // pointer's value before the call) stays there until the next exchange is complete.
    unsigned long long (*exchange)(int kind);
    void (*fail)(int fault);  // does not return
};
