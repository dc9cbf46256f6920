// What transport.cpp needs of the CUDA driver, in host memory.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void*) {
  memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuStreamCreate(void** stream, uint32_t) { return *stream = nullptr, 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuMemHostAlloc(void** memory, size_t bytes, uint32_t) { return *memory = malloc(bytes), 0; }
}
