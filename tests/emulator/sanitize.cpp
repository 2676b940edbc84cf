// Runs launches that tests/emulator/launches.py wrote to its input, under a sanitizer: `runner WORKERS < launches`.
// Arrays are heap blocks of exactly their length, so that ASan sees one element too far.  The teams of a launch are
// dealt out to WORKERS real threads one by one, so that TSan sees two teams that touch one place.
// ENTRIES (generated) lists the kernels' variants in the order of launches.ENTRIES.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <thread>
#include <vector>

using Runner = void (*)(int worker, int workers, int grid, const void* const* args);

#define ENTRY(NAME) extern "C" void NAME(int, int, int, const void* const*);
ENTRIES(ENTRY)
#undef ENTRY
#define ENTRY(NAME) NAME,
static const Runner runners[] = {ENTRIES(ENTRY)};
#undef ENTRY
#define FILE_OF_KERNELS(NAME) extern "C" const void* NAME();
FILES(FILE_OF_KERNELS)
#undef FILE_OF_KERNELS
#define FILE_OF_KERNELS(NAME) NAME,
static const void* (*const faults[])() = {FILES(FILE_OF_KERNELS)};

struct Buffer {
    char* data;
    int64_t far_bytes;  // of a mapping; 0: a heap block
};

struct Parameter {
    int32_t buffer, unused;  // -1: a number, or no array
    int64_t value;           // its bytes, or the offset in the array
};

static void read_exactly(void* to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "the launches end in the middle of one\n");
        exit(3);
    }
}

static Buffer read_buffer() {
    int64_t bytes;
    read_exactly(&bytes, sizeof(bytes));
    if (bytes < 0) {
        void* far = mmap(nullptr, -bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (far == MAP_FAILED) {
            perror("mmap");
            exit(3);
        }
        return {static_cast<char*>(far), -bytes};
    }
    char* data = static_cast<char*>(malloc(bytes));
    read_exactly(data, bytes);
    return {data, 0};
}

static void run_launch(const int32_t* head, int workers) {
    const int entry = head[0], grid = head[1];
    std::vector<Buffer> buffers(head[2]);
    for (Buffer& buffer : buffers) buffer = read_buffer();
    std::vector<Parameter> parameters(head[3]);
    read_exactly(parameters.data(), parameters.size() * sizeof(Parameter));
    std::vector<const void*> args;
    for (Parameter& parameter : parameters) {
        if (parameter.buffer >= 0) {
            const char* pointer = buffers[parameter.buffer].data + parameter.value;
            memcpy(&parameter.value, &pointer, sizeof(pointer));
        }
        args.push_back(&parameter.value);
    }
    std::vector<std::thread> threads;
    for (int worker = 1; worker < workers; ++worker) {
        threads.emplace_back(runners[entry], worker, workers, grid, args.data());
    }
    runners[entry](0, workers, grid, args.data());
    for (std::thread& thread : threads) thread.join();
    for (auto take : faults) {
        if (const void* address = take()) {
            fprintf(stderr, "entry %d: a vector access at %p, which is not aligned\n", entry, address);
            exit(4);
        }
    }
    for (const Buffer& buffer : buffers) {
        if (buffer.far_bytes) munmap(buffer.data, buffer.far_bytes);
        else free(buffer.data);
    }
}

int main(int, char** argv) {
    const int workers = atoi(argv[1]);
    int32_t head[4];  // entry, grid, arrays, parameters
    long long ran = 0;
    while (fread(head, sizeof(head), 1, stdin) == 1) {
        run_launch(head, workers);
        ++ran;
    }
    printf("%lld launches\n", ran);
    return 0;
}
