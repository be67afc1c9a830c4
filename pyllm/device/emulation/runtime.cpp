// runtime: runs an emulated kernel, block after block, with a fibre for each thread of the block.
//
// A fibre runs until it waits at a barrier or a warp exchange, or ends; then the next one that can run is resumed. The
// order among them is drawn from a seed, so that code which lacks a barrier meets an order that shows it. Nothing here
// aborts the process: whatever goes wrong in a kernel ends the launch with a fault code and a report.
//
// One launch at a time in a process: the loader's lock sees to that.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <vector>

#include "common/emulation.cuh"

extern "C" {

struct LaunchRequest {
    void (*run)(void** arguments);        // calls the kernel
    void (*bind)(Emulation* emulation);   // gives it its surroundings
    void** arguments;                     // address of each argument
    unsigned char* static_shared;         // its SHARED variables
    size_t static_bytes;
    size_t dynamic_bytes;
    uint64_t seed;
    uint32_t grid[3];
    uint32_t block[3];
    int32_t warp_size;
};

struct LaunchReport {
    uint64_t address;     // of a bad access
    uint32_t block[3];    // where it went wrong
    uint32_t thread[3];
    uint32_t at_barrier, at_exchange, ended;
};

int32_t emulation_launch(const LaunchRequest* request, LaunchReport* report);

// Index of the first of `count` ranges that is not filled with `byte`, or -1.
int64_t emulation_first_damaged(const uint64_t* addresses, const uint64_t* lengths, int64_t count, uint8_t byte);
}

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;  // of one fibre; pages that it never touches cost nothing
constexpr int POISON = 0xFF;
constexpr int GUARD = 0xA5;
constexpr size_t GUARD_BYTES = 256;

enum State : uint8_t { READY, AT_BARRIER, AT_EXCHANGE, ENDED };

#if defined(__x86_64__)
struct Context {
    void* stack_pointer;
};

// Saves what the calling convention lets a callee change to nobody, then the stack pointer; the other way round for the
// context that goes on.
extern "C" void pyllm_switch(Context* from, const Context* to);
asm(R"(
    .text
    .globl pyllm_switch
    .hidden pyllm_switch
    .type pyllm_switch, @function
pyllm_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size pyllm_switch, . - pyllm_switch
)");

void make_context(Context* context, unsigned char* top, void (*entry)()) {
    void** stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // where a return address of `entry` would be: keeps its stack aligned
    *--stack = reinterpret_cast<void*>(entry);
    stack -= 6;
    memset(stack, 0, 6 * sizeof(void*));
    context->stack_pointer = stack;
}

#elif defined(__aarch64__)
struct Context {
    void* stack_pointer;
};

extern "C" void pyllm_switch(Context* from, const Context* to);
asm(R"(
    .text
    .globl pyllm_switch
    .hidden pyllm_switch
    .type pyllm_switch, %function
pyllm_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    ldr x9, [x1]
    mov sp, x9
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size pyllm_switch, . - pyllm_switch
)");

void make_context(Context* context, unsigned char* top, void (*entry)()) {
    unsigned char* const stack = top - 160;
    memset(stack, 0, 160);
    void (*const link)() = entry;
    memcpy(stack + 88, &link, sizeof(link));  // x30: `ret` goes there
    context->stack_pointer = stack;
}

#else
}  // namespace
#include <ucontext.h>
namespace {
using Context = ucontext_t;

void pyllm_switch(Context* from, const Context* to) { swapcontext(from, to); }

void make_context(Context* context, unsigned char* top, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = top - STACK_BYTES / 2;
    context->uc_stack.ss_size = STACK_BYTES / 2;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
#endif

struct Thread {
    Context context;
    EmulatedIndex index;
    uint32_t number;  // in the block, x fastest
    State state;
};

struct Warp {
    uint32_t first;  // thread
    uint32_t size;
    uint32_t live;
    uint32_t waiting;
    uint64_t lanes[2];  // that came to the exchange, by parity
    int kind;
    int parity;
    unsigned char* slots[2];
};

// Threads that can run. Taken from the front; a group that becomes ready goes to either end, so that warps sometimes
// advance in turn and sometimes one runs far ahead.
class ReadyQueue {
  public:
    void reset(size_t capacity) {
        items_.assign(capacity, 0);
        front_ = size_ = 0;
    }
    bool empty() const { return size_ == 0; }
    uint32_t take() {
        const uint32_t item = items_[front_];
        front_ = front_ + 1 == items_.size() ? 0 : front_ + 1;
        size_--;
        return item;
    }
    void put(uint32_t item, bool in_front) {
        if (in_front) {
            front_ = front_ == 0 ? items_.size() - 1 : front_ - 1;
            items_[front_] = item;
        } else {
            const size_t end = front_ + size_;
            items_[end < items_.size() ? end : end - items_.size()] = item;
        }
        size_++;
    }

  private:
    std::vector<uint32_t> items_;
    size_t front_ = 0, size_ = 0;
};

// SplitMix64
struct Random {
    uint64_t state;
    uint32_t below(uint32_t limit) {
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return static_cast<uint32_t>(((z >> 32) * limit) >> 32);
    }
};

// Stacks of all fibres in one mapping, each above a page that may not be touched.
struct Stacks {
    unsigned char* base = nullptr;
    size_t count = 0;
    size_t page = 0;

    size_t stride() const { return STACK_BYTES + page; }

    bool reserve(size_t wanted) {
        if (wanted <= count) return true;
        if (base) munmap(base, count * stride());
        base = nullptr;
        count = 0;
        page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        void* const mapping = mmap(nullptr, wanted * stride(), PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapping == MAP_FAILED) return false;
        base = static_cast<unsigned char*>(mapping);
        count = wanted;
        for (size_t i = 0; i < count; i++) {
            if (mprotect(base + i * stride(), page, PROT_NONE)) return false;
        }
        return true;
    }

    // Staggered, since tops at the same distance would share few cache sets.
    unsigned char* top(size_t i) const { return base + (i + 1) * stride() - i % 32 * 128; }

    bool in_guard(const unsigned char* address) const {
        return address >= base && address < base + count * stride() &&
               static_cast<size_t>(address - base) % stride() < page;
    }
};

struct Run {
    const LaunchRequest* request;
    LaunchReport* report;
    Emulation emulation;
    Random random;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<unsigned char> slots;
    std::vector<unsigned char> dynamic_shared;
    ReadyQueue ready;
    Context main;
    Thread* current;
    uint32_t at_barrier, ended;
    int fault;
    pthread_t os_thread;
    sigjmp_buf escape;
};

Stacks stacks;
Run* run;

Warp& warp_of(const Thread& thread) { return run->warps[thread.number / run->request->warp_size]; }

void switch_to(Context* from, Thread& thread) {
    run->current = &thread;
    Emulation& emulation = run->emulation;
    const Warp& warp = warp_of(thread);
    emulation.thread_index = thread.index;
    emulation.lane = static_cast<int>(thread.number - warp.first);
    emulation.slots = warp.slots[warp.parity];
    if (from != &thread.context) pyllm_switch(from, &thread.context);
}

// The calling fibre waits or has ended: the next one runs. Without any, the block is done or stuck.
void give_way() {
    Thread& self = *run->current;
    if (run->ready.empty()) {
        pyllm_switch(&self.context, &run->main);
    } else {
        switch_to(&self.context, run->threads[run->ready.take()]);
    }
}

void make_ready(uint32_t first, uint32_t size, State waiting_in) {
    uint32_t group[1024];
    uint32_t count = 0;
    for (uint32_t i = first; i < first + size; i++) {
        if (run->threads[i].state == waiting_in) group[count++] = i;
    }
    const bool in_front = run->random.below(2);
    while (count > 0) {
        const uint32_t drawn = run->random.below(count);
        run->threads[group[drawn]].state = READY;
        run->ready.put(group[drawn], in_front);
        group[drawn] = group[--count];
    }
}

void finish_exchange(Warp& warp) {
    warp.waiting = 0;
    warp.parity ^= 1;
    make_ready(warp.first, warp.size, AT_EXCHANGE);
}

void leave_with(int fault) {
    run->fault = fault;
    Context abandoned;
    pyllm_switch(&abandoned, &run->main);
    __builtin_unreachable();
}

void barrier() {
    Thread& self = *run->current;
    self.state = AT_BARRIER;
    if (++run->at_barrier == run->threads.size()) {
        run->at_barrier = 0;
        make_ready(0, static_cast<uint32_t>(run->threads.size()), AT_BARRIER);
    }
    give_way();
}

unsigned long long exchange(int kind) {
    Thread& self = *run->current;
    Warp& warp = warp_of(self);
    const int parity = warp.parity;
    if (warp.waiting == 0) {
        warp.kind = kind;
        warp.lanes[parity] = 0;
    } else if (warp.kind != kind) {
        leave_with(FAULT_EXCHANGE);
    }
    warp.lanes[parity] |= uint64_t{1} << (self.number - warp.first);
    self.state = AT_EXCHANGE;
    if (++warp.waiting == warp.live) finish_exchange(warp);
    give_way();
    return warp.lanes[parity];
}

void thread_main() {
    run->request->run(run->request->arguments);
    Thread& self = *run->current;
    Warp& warp = warp_of(self);
    self.state = ENDED;
    run->ended++;
    warp.live--;
    if (warp.waiting > 0 && warp.waiting == warp.live) finish_exchange(warp);
    give_way();
    __builtin_unreachable();
}

void prepare_launch() {
    const LaunchRequest& request = *run->request;
    const uint32_t count = request.block[0] * request.block[1] * request.block[2];
    const uint32_t warp_size = static_cast<uint32_t>(request.warp_size);
    const uint32_t num_warps = (count + warp_size - 1) / warp_size;
    run->threads.resize(count);
    run->warps.resize(num_warps);
    run->slots.resize(size_t{2} * num_warps * warp_size * EXCHANGE_BYTES + 64);
    run->dynamic_shared.resize(request.dynamic_bytes + GUARD_BYTES + 64);
    const auto align = [](unsigned char* p) { return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64; };
    unsigned char* slots = align(run->slots.data());
    for (uint32_t i = 0; i < num_warps; i++) {
        Warp& warp = run->warps[i];
        warp.first = i * warp_size;
        warp.size = count - warp.first < warp_size ? count - warp.first : warp_size;
        for (unsigned char*& own : warp.slots) {
            own = slots;
            slots += size_t{warp_size} * EXCHANGE_BYTES;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        run->threads[i].number = i;
        run->threads[i].index = {i % request.block[0], i / request.block[0] % request.block[1],
                                 i / request.block[0] / request.block[1]};
    }
    Emulation& emulation = run->emulation;
    emulation.grid_extent = {request.grid[0], request.grid[1], request.grid[2]};
    emulation.block_extent = {request.block[0], request.block[1], request.block[2]};
    emulation.dynamic_shared = align(run->dynamic_shared.data());
    emulation.barrier = barrier;
    emulation.exchange = exchange;
    emulation.fail = leave_with;
    request.bind(&emulation);
}

// Shared memory as a kernel finds it: undefined.
void poison_shared() {
    const LaunchRequest& request = *run->request;
    memset(request.static_shared, POISON, request.static_bytes);
    memset(run->emulation.dynamic_shared, POISON, request.dynamic_bytes);
    memset(run->emulation.dynamic_shared + request.dynamic_bytes, GUARD, GUARD_BYTES);
}

int run_block() {
    const uint32_t count = static_cast<uint32_t>(run->threads.size());
    poison_shared();
    run->ready.reset(count);
    run->at_barrier = run->ended = 0;
    run->fault = FAULT_NONE;
    for (Warp& warp : run->warps) {
        warp.live = warp.size;
        warp.waiting = 0;
        warp.parity = 0;
    }
    for (Thread& thread : run->threads) {
        thread.state = AT_BARRIER;
        make_context(&thread.context, stacks.top(thread.number), thread_main);
    }
    make_ready(0, count, AT_BARRIER);
    switch_to(&run->main, run->threads[run->ready.take()]);
    if (run->fault) return run->fault;
    if (run->ended != count) return FAULT_BARRIER;
    const unsigned char* const guard = run->emulation.dynamic_shared + run->request->dynamic_bytes;
    for (size_t i = 0; i < GUARD_BYTES; i++) {
        if (guard[i] != GUARD) return FAULT_SHARED;
    }
    return FAULT_NONE;
}

uint32_t common_divisor(uint32_t a, uint32_t b) { return b ? common_divisor(b, a % b) : a; }

// All blocks, in an order drawn from the seed.
int run_grid() {
    const uint32_t* const grid = run->request->grid;
    const uint32_t count = grid[0] * grid[1] * grid[2];
    const uint32_t start = run->random.below(count);
    uint32_t step = 1 + run->random.below(count);
    while (common_divisor(step, count) != 1) step++;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t block = static_cast<uint32_t>((start + uint64_t{i} * step) % count);
        run->emulation.block_index = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
        if (const int fault = run_block()) return fault;
    }
    return FAULT_NONE;
}

void fill_report() {
    LaunchReport& report = *run->report;
    const EmulatedIndex& block = run->emulation.block_index;
    const EmulatedIndex& thread = run->emulation.thread_index;
    const uint32_t block_words[] = {block.x, block.y, block.z};
    const uint32_t thread_words[] = {thread.x, thread.y, thread.z};
    memcpy(report.block, block_words, sizeof(block_words));
    memcpy(report.thread, thread_words, sizeof(thread_words));
    report.ended = run->ended;
    report.at_barrier = run->at_barrier;
    report.at_exchange = 0;
    for (const Warp& warp : run->warps) report.at_exchange += warp.waiting;
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction former_actions[3];

// A bad access of the kernel leaves the launch; one of any other thread goes where it would have gone.
void on_signal(int number, siginfo_t* info, void*) {
    if (run && pthread_equal(run->os_thread, pthread_self())) {
        const auto* const address = static_cast<unsigned char*>(info->si_addr);
        run->report->address = reinterpret_cast<uint64_t>(address);
        run->fault = number == SIGFPE             ? FAULT_ARITHMETIC
                     : stacks.in_guard(address) ? FAULT_STACK
                                                : FAULT_MEMORY;
        siglongjmp(run->escape, 1);
    }
    for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &former_actions[i], nullptr);  // returning repeats the access
}

// Handlers while a launch runs, on a stack of their own, since the fibre's may be what is full.
class SignalScope {
  public:
    SignalScope() {
        stack_t own = {};
        own.ss_sp = memory_;
        own.ss_size = sizeof(memory_);
        sigaltstack(&own, &former_stack_);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &action, &former_actions[i]);
    }
    ~SignalScope() {
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &former_actions[i], nullptr);
        sigaltstack(&former_stack_, nullptr);
    }

  private:
    stack_t former_stack_;
    alignas(16) static unsigned char memory_[64 * 1024];
};
alignas(16) unsigned char SignalScope::memory_[64 * 1024];

}  // namespace

int32_t emulation_launch(const LaunchRequest* request, LaunchReport* report) {
    static Run state;
    memset(report, 0, sizeof(*report));
    state.request = request;
    state.report = report;
    state.random.state = request->seed;
    state.os_thread = pthread_self();
    run = &state;
    int fault = FAULT_RESOURCES;
    try {
        prepare_launch();
        if (stacks.reserve(state.threads.size())) {
            SignalScope scope;
            fault = sigsetjmp(state.escape, 1) ? state.fault : run_grid();
        }
    } catch (const std::bad_alloc&) {
    }
    if (fault) fill_report();
    run = nullptr;
    return fault;
}

int64_t emulation_first_damaged(const uint64_t* addresses, const uint64_t* lengths, int64_t count, uint8_t byte) {
    for (int64_t i = 0; i < count; i++) {
        const auto* const range = reinterpret_cast<const unsigned char*>(addresses[i]);
        for (uint64_t j = 0; j < lengths[i]; j++) {
            if (range[j] != byte) return i;
        }
    }
    return -1;
}
