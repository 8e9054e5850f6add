// A GPU that is not there. Loaded before torch, this library takes the place of libcuda and of what torch calls in libcudart,
// cuBLAS and NCCL: it answers as the card named by NULL_GPU_CARD, hands out memory within that card's limit, counts launches,
// copies, waits and collectives, and computes nothing. What is not written out here answers "success" (rest.inc, made by setup).
//
//   NULL_GPU_CARD    H100 (default) or another of CARDS, with what CUDA says of it: less memory than its name
//   NULL_GPU_CODE    the cards that torch has code for, in place of those of this build (TORCH_CODE, by setup): "sm_70 compute_80"
//   NULL_GPU_COUNT   how many of them, 1 by default
//   NULL_GPU_BYTES   the memory of each, in place of the card's
//   NULL_GPU_ANSWER  what results of 8 to 64 bytes read as, as float32; -1 by default. A single number of 4 bytes reads as 1
#include <dlfcn.h>
#include <driver_types.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
using Lock = std::lock_guard<std::mutex>;

struct Card { const char *key, *name; int major, minor, sms; size_t bytes; int shared_optin, shared_sm, threads_sm; };
static const Card CARDS[] = {
  {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 85017493504, 232448, 233472, 2048},
  {"H200", "NVIDIA H200", 9, 0, 132, 150110011392, 232448, 233472, 2048},
  {"B200", "NVIDIA B200", 10, 0, 148, 191501828096, 232448, 233472, 2048},
  {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 84987740160, 166912, 167936, 2048},
  {"A100 40GB", "NVIDIA A100-SXM4-40GB", 8, 0, 108, 42297786368, 166912, 167936, 2048},
  {"RTX 4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 25386352640, 101376, 102400, 1536},
  {"RTX 5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, 33677180928, 101376, 102400, 1536},
  {"T4", "Tesla T4", 7, 5, 40, 15642329088, 65536, 65536, 1024},
  {"V100", "Tesla V100-SXM2-16GB", 7, 0, 80, 16935682048, 98304, 98304, 2048},
  {"V100 32GB", "Tesla V100-SXM2-32GB", 7, 0, 80, 34089730048, 98304, 98304, 2048},
};
static const char* setting(const char* name, const char* otherwise) {
  const char* s = getenv(name); return s && *s ? s : otherwise;
}

static const size_t PAGE = 2 << 20;             // cudaMalloc's grain
static const size_t CONTEXT = 550ull << 20;     // what a CUDA context takes, roughly
static const size_t SMALL = 65536;              // copies up to this are made: tensors of the host's, indices, sizes
static const int MOST = 64;                     // GPUs
struct Block { size_t bytes; int device; };     // device -1: pinned memory of the host
struct Span { const char *begin, *end; };
struct Event { long launches; };

// All state; never destroyed, because torch's own destructors still free memory when the process ends
struct State {
  std::mutex mutex;
  std::map<size_t, Block> blocks;                               // by address
  size_t used[MOST] = {}, peak[MOST] = {};
  std::map<std::string, long> counts;                           // of what is not a kernel
  std::unordered_map<const void*, long> launches;               // by kernel
  std::unordered_map<const void*, std::string> names;           // of kernels
  std::vector<std::pair<const char*, size_t>> collectives;      // in their order, with bytes
  std::vector<Span> known;                                      // device memory that holds what the host copied there
  long launched = 0;                                            // in all
  Card card = {};
  int code = 0;                                                 // the newest version of torch's code that this card runs; 0: none
  int count = atoi(setting("NULL_GPU_COUNT", "1"));
  float answer = atof(setting("NULL_GPU_ANSWER", "-1"));
  State() { play(setting("NULL_GPU_CARD", "H100")); }
  void play(const char* key) {
    card = {};
    for (auto& c : CARDS) if (!strcmp(c.key, key)) card = c;
    if (!card.key) {
      fprintf(stderr, "NULL_GPU_CARD '%s' is none of", key);
      for (auto& c : CARDS) fprintf(stderr, " '%s'", c.key);
      fputs("\n", stderr);
      _exit(2);
    }
    if (const char* bytes = getenv("NULL_GPU_BYTES")) card.bytes = strtoull(bytes, nullptr, 10);
    code = 0;           // a card runs code for its own generation up to its own version, and PTX for any up to it
    int n, own = 10 * card.major + card.minor;
    for (const char* s = setting("NULL_GPU_CODE", TORCH_CODE); *s; s++) {
      bool runs = sscanf(s, "sm_%d", &n) == 1 ? n / 10 == card.major : sscanf(s, "compute_%d", &n) == 1;
      if (runs && n <= own && n > code) code = n;
    }
  }
};
static State& gpu() { static State* state = new State; return *state; }
static thread_local int current = 0;            // the device, as CUDA keeps it: a thread's own
static void count(const char* what) { Lock lock(gpu().mutex); gpu().counts[what]++; }

// ---- what Python asks for (nullgpu.py)
API void null_gpu_reset() {
  Lock lock(gpu().mutex);
  gpu().counts.clear(); gpu().launches.clear(); gpu().collectives.clear();
  for (int d = 0; d < MOST; d++) gpu().peak[d] = gpu().used[d];
}
API size_t null_gpu_peak() { size_t most = 0; for (size_t p : gpu().peak) most = p > most ? p : most; return most; }
API size_t null_gpu_bytes() { return gpu().card.bytes; }
API void null_gpu_play(const char* card) { gpu().play(card); }  // before CUDA's first use
API void null_gpu_dump(const char* path) {
  Lock lock(gpu().mutex);
  FILE* f = fopen(path, "w");
  for (auto& [what, n] : gpu().counts) fprintf(f, "%ld\t%s\n", n, what.c_str());
  for (auto& [kernel, n] : gpu().launches) fprintf(f, "%ld\tkernel %s\n", n, gpu().names[kernel].c_str());
  for (auto& [what, bytes] : gpu().collectives) fprintf(f, "%zu\tcollective %s\n", bytes, what);
  fclose(f);
}

// ---- memory
static bool find(const void* p, Block* block) {
  Lock lock(gpu().mutex);
  auto it = gpu().blocks.upper_bound((size_t)p);
  if (it == gpu().blocks.begin()) return false;
  --it;
  if ((size_t)p >= it->first + it->second.bytes) return false;
  *block = it->second;
  return true;
}
static cudaError_t take(void** p, size_t n, int device) {
  State& g = gpu();
  Lock lock(g.mutex);
  *p = nullptr;
  n = n ? (n + PAGE - 1) / PAGE * PAGE : PAGE;
  if (device >= 0 && g.used[device] + n > g.card.bytes - CONTEXT) { g.counts["out of memory"]++; return cudaErrorMemoryAllocation; }
  // addresses without memory behind them, until someone writes there
  void* q = mmap(nullptr, n + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (q == MAP_FAILED) return cudaErrorMemoryAllocation;
  size_t at = ((size_t)q + PAGE - 1) / PAGE * PAGE;
  g.blocks[at] = {n, device};
  if (device >= 0 && (g.used[device] += n) > g.peak[device]) g.peak[device] = g.used[device];
  *p = (void*)at;
  return cudaSuccess;
}
static cudaError_t drop(void* p) {
  State& g = gpu();
  Lock lock(g.mutex);
  auto it = g.blocks.find((size_t)p);
  if (it == g.blocks.end()) return cudaSuccess;
  munmap(p, it->second.bytes);
  if (it->second.device >= 0) g.used[it->second.device] -= it->second.bytes;
  g.blocks.erase(it);
  g.known.clear();
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** p, size_t n) { count("cudaMalloc"); return take(p, n, current); }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return take(p, n, current); }
API cudaError_t cudaFree(void* p) { if (p) count("cudaFree"); return drop(p); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return drop(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { count("cudaHostAlloc"); return take(p, n, -1); }
API cudaError_t cudaFreeHost(void* p) { return drop(p); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  *all = gpu().card.bytes; *free = *all - CONTEXT - gpu().used[current]; return cudaSuccess;
}

// Addresses apart from memory, for PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: a handle is a piece of memory with its size
struct Piece { size_t bytes; int device; };
API int cuMemGetAllocationGranularity(size_t* n, const void*, int) { *n = PAGE; return 0; }
API int cuMemAddressReserve(size_t* p, size_t n, size_t, size_t, size_t) {
  void* q = mmap(nullptr, n + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *p = ((size_t)q + PAGE - 1) / PAGE * PAGE;
  return q == MAP_FAILED ? 2 : 0;
}
API int cuMemAddressFree(size_t p, size_t n) { munmap((void*)p, n); return 0; }
API int cuMemCreate(Piece** handle, size_t n, const int* properties, size_t) {
  State& g = gpu();
  Lock lock(g.mutex);
  int device = properties[3];                   // CUmemAllocationProp.location.id
  g.counts["cudaMalloc"]++;
  if (g.used[device] + n > g.card.bytes - CONTEXT) { g.counts["out of memory"]++; return 2; }
  if ((g.used[device] += n) > g.peak[device]) g.peak[device] = g.used[device];
  *handle = new Piece{n, device};
  return 0;
}
API int cuMemRelease(Piece* piece) {
  Lock lock(gpu().mutex);
  gpu().counts["cudaFree"]++; gpu().used[piece->device] -= piece->bytes;
  delete piece;
  return 0;
}
API int cuMemMap(size_t p, size_t n, size_t, Piece* piece, size_t) {
  Lock lock(gpu().mutex); gpu().blocks[p] = {n, piece->device}; return 0;
}
API int cuMemUnmap(size_t p, size_t n) {
  Lock lock(gpu().mutex);
  auto& blocks = gpu().blocks;
  blocks.erase(blocks.lower_bound(p), blocks.lower_bound(p + n));
  madvise((void*)p, n, MADV_DONTNEED);
  return 0;
}

// A number that a kernel would have computed reads as `answer`, many as zeros; what only the host's copies and collectives have touched
// since the last launch is real, for DDP checks by such numbers that all processes agree on the parameters and their order.
static bool is_known(const void* p, size_t n) {
  for (auto& s : gpu().known) if (s.begin <= p && (const char*)p + n <= s.end) return true;
  return false;
}
API int null_gpu_knows(const void* p, size_t n) { Lock lock(gpu().mutex); return is_known(p, n); }
static void pass_on(void* to, const void* from, size_t n, bool known) {
  if (n > SMALL) return;
  if (to != from) memmove(to, from, n);
  if (known) gpu().known.push_back({(const char*)to, (const char*)to + n});
}
static cudaError_t copy(void* to, const void* from, size_t n, bool blocking) {
  Block source = {0, -2}, target = {0, -2};     // -2: memory that nobody pinned
  find(from, &source);
  find(to, &target);
  bool reads = source.device >= 0, writes = target.device >= 0;
  int host = reads ? target.device : source.device;
  std::string kind = reads && writes ? "D2D" : std::string(reads ? "D2H" : writes ? "H2D" : "H2H") + (host == -1 ? " pinned" : " pageable");
  count(("copy " + kind + (blocking ? " blocking" : "")).c_str());
  State& g = gpu();
  Lock lock(g.mutex);
  if (writes) { g.launched++; pass_on(to, from, n, !reads || is_known(from, n)); return cudaSuccess; }
  if (!reads || is_known(from, n)) memmove(to, from, n);
  else if (n < 4 || n > 64) memset(to, 0, n < SMALL ? n : SMALL);
  else for (size_t i = 0; i < n / 4; i++) ((float*)to)[i] = n == 4 ? 1.0f : g.answer;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return copy(to, from, n, true); }
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, n, false);
}
static void queue(const void* kernel) {
  Lock lock(gpu().mutex);
  if (kernel) gpu().launches[kernel]++;
  gpu().launched++;
  gpu().known.clear();
}
API cudaError_t cudaMemset(void*, int, size_t) { queue(nullptr); return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { queue(nullptr); return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Block block;
  bool found = find(p, &block);
  memset(a, 0, sizeof *a);
  a->type = !found ? cudaMemoryTypeUnregistered : block.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = found && block.device >= 0 ? block.device : current;
  a->devicePointer = a->hostPointer = (void*)p;
  return cudaSuccess;
}

// ---- the device
static int attribute(int a) {
  const Card& c = gpu().card;
  switch (a) {                                  // the driver's attributes have the same numbers
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return c.shared_optin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return c.shared_sm;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrTotalConstantMemory: case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrMultiProcessorCount: return c.sms;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return c.threads_sm;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrComputeCapabilityMajor: return c.major;
    case cudaDevAttrComputeCapabilityMinor: return c.minor;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported: return 1;
    case cudaDevAttrClusterLaunch: return c.major >= 9;
  }
  return 0;
}
API cudaError_t cudaDeviceGetAttribute(int* v, int a, int) { *v = attribute(a); return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  const Card& c = gpu().card;
  memset(p, 0, sizeof *p);
  strcpy(p->name, c.name);
  p->major = c.major; p->minor = c.minor; p->multiProcessorCount = c.sms; p->totalGlobalMem = c.bytes; p->pciBusID = 1 + device;
  p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = c.threads_sm; p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = p->memPitch = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536; p->textureAlignment = 512; p->texturePitchAlignment = 32;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = c.shared_optin; p->sharedMemPerMultiprocessor = c.shared_sm;
  p->reservedSharedMemPerBlock = 1024; p->memoryBusWidth = 5120; p->l2CacheSize = 52428800; p->asyncEngineCount = 3;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = p->memoryPoolsSupported = 1;
  p->clusterLaunch = c.major >= 9;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int* n) { *n = gpu().count; return cudaSuccess; }
API cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= gpu().count) return cudaErrorInvalidDevice; current = d; return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* n) { *n = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* n) { *n = 13000; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", 1 + d); return cudaSuccess; }
API const char* cudaGetErrorName(int) { return "nullGpuError"; }
API const char* cudaGetErrorString(int e) {
  return e == 2 ? "out of memory" : e == 209 ? "no kernel image is available for execution on the device" : "an error of the GPU that is not there";
}
static int nothing() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
  if (!(*f = dlsym(RTLD_DEFAULT, name))) *f = (void*)nothing;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- streams and events. All that was queued counts as done; a wait is told by what it would have waited for.
template <class T> static int make(T* p) { *(void**)p = calloc(1, 256); return 0; }
API int cudaStreamCreate(cudaStream_t* s) { return make(s); }
API int cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return make(s); }
API int cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return make(s); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) { *p = 0; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { count("wait for a stream"); return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { count("wait for the device"); return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone; return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, ...) {
  *s = cudaStreamCaptureStatusNone; return cudaSuccess;
}
API int cudaEventCreate(cudaEvent_t* e) { return make(e); }
API int cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return make(e); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  Lock lock(gpu().mutex); ((Event*)e)->launches = gpu().launched; return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {           // with work queued behind it, the GPU goes on meanwhile
  Lock lock(gpu().mutex);
  gpu().counts["wait for an event, " + std::to_string(gpu().launched - ((Event*)e)->launches) + " launches behind it"]++;
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t, cudaEvent_t) { *t = 1.0f; return cudaSuccess; }

// ---- kernels of the runtime API: torch's own
struct Dim { unsigned x, y, z; };
static thread_local cudaError_t failed = cudaSuccess;
static cudaError_t launch(const void* kernel) {
  if (!gpu().code) return failed = cudaErrorNoKernelImageForDevice;
  queue(kernel);
  return cudaSuccess;
}
API cudaError_t cudaPeekAtLastError() { return failed; }
API cudaError_t cudaGetLastError() { cudaError_t last = failed; failed = cudaSuccess; return last; }
API void** __cudaRegisterFatBinary(void*) { static void* handle[64]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock lock(gpu().mutex); gpu().names[host] = std::string("aten ") + name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API cudaError_t __cudaGetKernel(void** k, const void* host) { *k = (void*)host; return cudaSuccess; }
API unsigned __cudaPushCallConfiguration(Dim, Dim, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(Dim*, Dim*, size_t*, void*) { return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(void* k, Dim, Dim, void**, size_t, void*) { return launch(k); }
API cudaError_t cudaLaunchKernel(const void* k, Dim, Dim, void**, size_t, void*) { return launch(k); }
API cudaError_t cudaLaunchKernelExC(const void*, const void* k, void**) { return launch(k); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  if (!gpu().code) return failed = cudaErrorNoKernelImageForDevice;
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = gpu().code;
  a->maxDynamicSharedSizeBytes = gpu().card.shared_optin;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2; return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* s) { *p = (void*)s; return cudaSuccess; }

// ---- cuBLAS
static int product(const char* name) { queue(nullptr); count(name); return 0; }
API int cublasCreate_v2(void** h) { return make(h); }
API int cublasGetMathMode(void*, int* m) { *m = 0; return 0; }
API int cublasGetPointerMode_v2(void*, int* m) { *m = 0; return 0; }
API int cublasLtMatmulDescCreate(void** p, int, int) { return make(p); }
API int cublasLtMatmulPreferenceCreate(void** p) { return make(p); }
API int cublasLtMatrixLayoutCreate(void** p, int, long, long, long) { return make(p); }
API size_t cublasLtGetVersion() { return 130101; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* r, int* n) {
  memset(r, 0, 96); *n = 1; return 0;
}
API int cublasLtMatmul() { return product("cublasLtMatmul"); }
API int cublasGemmEx() { return product("cublasGemmEx"); }
API int cublasGemmStridedBatchedEx() { return product("cublasGemmStridedBatchedEx"); }
API int cublasSgemm_v2() { return product("cublasSgemm"); }
API int cublasSgemmStridedBatched() { return product("cublasSgemmStridedBatched"); }
API int cublasSgemmEx() { return product("cublasSgemmEx"); }

// ---- the driver API: Triton's kernels
static char a_context[64];
API int cuInit(unsigned) { return 0; }
API int cuGetErrorString(int, const char** s) { *s = "an error of the GPU that is not there"; return 0; }
API int cuGetErrorName(int, const char** s) { *s = "NULL_GPU"; return 0; }
API int cuDriverGetVersion(int* n) { *n = 13000; return 0; }
API int cuDeviceGetCount(int* n) { *n = gpu().count; return 0; }
API int cuDeviceGet(int* d, int ordinal) { *d = ordinal; return 0; }
API int cuDeviceGetAttribute(int* v, int a, int) { *v = attribute(a); return 0; }
API int cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "%s", gpu().card.name); return 0; }
API int cuCtxGetCurrent(void** c) { *c = a_context; return 0; }
API int cuCtxGetDevice(int* d) { *d = current; return 0; }
API int cuDevicePrimaryCtxRetain(void** c, int) { *c = a_context; return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* f, int* active) { *f = 0; *active = 1; return 0; }
API int cuModuleLoad(void** m, const char*) { return make(m); }
API int cuModuleLoadData(void** m, const void*) { return make(m); }
API int cuModuleLoadDataEx(void** m, const void*, unsigned, void*, void*) { return make(m); }
API int cuModuleGetFunction(void** f, void*, const char* name) {
  make(f); Lock lock(gpu().mutex); gpu().names[*f] = std::string("triton ") + name; return 0;
}
API int cuFuncGetAttribute(int* v, int a, void*) {
  *v = a == 0 ? 1024 : a == 4 ? 32 : a == 5 || a == 6 ? 10 * gpu().card.major + gpu().card.minor : 0; return 0;
}
API int cuLaunchKernel(void* f, ...) { queue(f); return 0; }
API int cuLaunchCooperativeKernel(void* f, ...) { queue(f); return 0; }
API int cuLaunchKernelEx(const void*, void* f, void**, void**) { queue(f); return 0; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) { *n = 2; return 0; }
API int cuOccupancyMaxActiveClusters(int* n, void*, const void*) { *n = 66; return 0; }
API int cuPointerGetAttribute(void* v, int a, unsigned long long p) {
  Block block = {0, current};
  find((void*)p, &block);
  if (a == 2) *(int*)v = block.device < 0 ? 1 : 2;                              // the kind of memory: host or device
  else if (a == 9) *(int*)v = block.device < 0 ? current : block.device;        // whose
  else *(unsigned long long*)v = p;
  return 0;
}

#include "null_nccl.inc"
#include "rest.inc"
