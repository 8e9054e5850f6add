// A GPU that is not there. Loaded before torch, this library takes the place of libcuda and of what torch calls in
// libcudart, cuBLAS and NCCL: it answers as the card named by NULL_GPU_CARD, hands out memory within that card's limit,
// counts launches, copies, waits and collectives, and computes nothing. What is not written out here answers "success" (setup).
//
//   NULL_GPU_CARD    H100 (default) or another of CARDS, with what CUDA says of it: less memory than its name
//   NULL_GPU_COUNT   how many of them, 1 by default
//   NULL_GPU_BYTES   the memory of each, in place of the card's
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
#include <utility>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
// functions that set what their first or second argument points to
#define FIRST(name, type, value) API int name(type* p) { *p = value; return 0; }
#define SECOND(name, type, value) API int name(void*, type* p) { *p = value; return 0; }
#define HANDLE(name) FIRST(name, void*, calloc(1, 256))
using Lock = std::lock_guard<std::mutex>;

struct Card { const char *key, *name; int major, minor, sms; size_t bytes; int shared_optin, shared_sm, threads_sm; };
static const Card CARDS[] = {
  {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 85017493504, 232448, 233472, 2048},
  {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 84987740160, 166912, 167936, 2048},
  {"RTX 4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 25386352640, 101376, 102400, 1536},
  {"T4", "Tesla T4", 7, 5, 40, 15642329088, 65536, 65536, 1024},
  {"V100", "Tesla V100-SXM2-16GB", 7, 0, 80, 16935682048, 98304, 98304, 2048},
};
static const size_t PAGE = 2 << 20;             // cudaMalloc's grain
static const size_t CONTEXT = 550ull << 20;     // what a CUDA context takes, roughly
static const size_t SMALL = 65536;              // copies up to this are made: tensors of the host's, indices, sizes
static const int MOST = 64;                     // GPUs
struct Block { size_t bytes; int device; };     // device -1: pinned memory of the host; -2: not from here
struct Span { const char *begin, *end; };

// All state; never destroyed, because torch's own destructors still free memory when the process ends
struct State {
  std::mutex mutex;
  std::map<size_t, Block> blocks;                               // by address
  size_t used[MOST] = {}, peak[MOST] = {};
  std::map<std::string, long> counts;                           // of launches, copies, waits
  std::vector<std::pair<const char*, size_t>> collectives;      // in their order, with bytes
  std::vector<Span> known;                                      // device memory that holds what the host copied there
  long launched = 0;                                            // in all
  Card card = {};
  int code = 0;                                                 // the newest version of torch's code that this card runs; 0: none
  State() {
    const char *key = getenv("NULL_GPU_CARD"), *bytes = getenv("NULL_GPU_BYTES");
    for (auto& c : CARDS) if (!strcmp(c.key, key ? key : "H100")) card = c;
    if (!card.key) { fprintf(stderr, "NULL_GPU_CARD %s is none of null_gpu.cpp's CARDS\n", key); _exit(2); }
    if (bytes) card.bytes = strtoull(bytes, nullptr, 10);
    // a card runs code for its own generation up to its own version, and PTX for any up to it
    int n, own = 10 * card.major + card.minor;
    for (const char* s = TORCH_CODE; *s; s++) {                 // "sm_75 sm_80 ... compute_120"
      bool runs = sscanf(s, "sm_%d", &n) == 1 ? n / 10 == card.major : sscanf(s, "compute_%d", &n) == 1;
      if (runs && n <= own && n > code) code = n;
    }
  }
};
static State& gpu() { static State* state = new State; return *state; }
static int gpus() { const char* n = getenv("NULL_GPU_COUNT"); return n ? atoi(n) : 1; }
static thread_local int current = 0;            // the device, as CUDA keeps it: a thread's own
static void count(const std::string& what) { Lock lock(gpu().mutex); gpu().counts[what]++; }
static int queue(const char* what) {            // a kernel
  Lock lock(gpu().mutex);
  gpu().counts[what]++; gpu().launched++; gpu().known.clear();
  return 0;
}

// ---- what Python asks for (nullgpu.py)
API size_t null_gpu_peak() { size_t most = 0; for (size_t p : gpu().peak) most = p > most ? p : most; return most; }
API const char* null_gpu_take() {               // what happened since the last call, and forgets it
  static std::string text;
  Lock lock(gpu().mutex);
  text.clear();
  for (auto& [what, n] : gpu().counts) text += std::to_string(n) + "\t" + what + "\n";
  for (auto& [what, bytes] : gpu().collectives) text += std::to_string(bytes) + "\tcollective " + what + "\n";
  gpu().counts.clear(); gpu().collectives.clear();
  for (int d = 0; d < MOST; d++) gpu().peak[d] = gpu().used[d];
  return text.c_str();
}

// ---- memory
static Block find(const void* p) {
  Lock lock(gpu().mutex);
  auto it = gpu().blocks.upper_bound((size_t)p);
  if (it == gpu().blocks.begin()) return {0, -2};
  --it;
  return (size_t)p < it->first + it->second.bytes ? it->second : Block{0, -2};
}
static int take(void** p, size_t n, int device) {
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
  return 0;
}
static int drop(void* p) {
  State& g = gpu();
  Lock lock(g.mutex);
  auto it = g.blocks.find((size_t)p);
  if (it == g.blocks.end()) return 0;
  munmap(p, it->second.bytes);
  if (it->second.device >= 0) g.used[it->second.device] -= it->second.bytes;
  g.blocks.erase(it);
  g.known.clear();
  return 0;
}
API int cudaMalloc(void** p, size_t n) { count("cudaMalloc"); return take(p, n, current); }
API int cudaFree(void* p) { if (p) count("cudaFree"); return drop(p); }
API int cudaHostAlloc(void** p, size_t n, unsigned) { count("cudaHostAlloc"); return take(p, n, -1); }
API int cudaFreeHost(void* p) { return drop(p); }
API int cudaMemGetInfo(size_t* free, size_t* all) {
  *all = gpu().card.bytes; *free = *all - CONTEXT - gpu().used[current]; return 0;
}

// What a kernel would have computed reads as floats of -1 if it has 8 to 64 bytes, else as zeros: no loss, norm or
// float16's found_inf is an error. What only the host's copies and collectives have touched since the last launch is real:
// DDP checks by such numbers that all processes agree on the parameters, and ranks agree by them whether to stop.
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
static int copy(void* to, const void* from, size_t n, bool blocking) {
  int source = find(from).device, target = find(to).device;
  bool reads = source >= 0, writes = target >= 0, pinned = (reads ? target : source) == -1;
  std::string kind = reads && writes ? "D2D" : std::string(reads ? "D2H" : writes ? "H2D" : "H2H") + (pinned ? " pinned" : " pageable");
  count("copy " + kind + (blocking ? " blocking" : ""));
  State& g = gpu();
  Lock lock(g.mutex);
  if (writes) { g.launched++; pass_on(to, from, n, !reads || is_known(from, n)); return 0; }
  if (!reads || is_known(from, n)) memmove(to, from, n);
  else if (n < 8 || n > 64) memset(to, 0, n);
  else for (size_t i = 0; i < n / 4; i++) ((float*)to)[i] = -1;
  return 0;
}
API int cudaMemcpy(void* to, const void* from, size_t n) { return copy(to, from, n, true); }
API int cudaMemcpyAsync(void* to, const void* from, size_t n) { return copy(to, from, n, false); }
#define KERNEL(name, kind) API int name() { return queue(kind); }
KERNEL(cudaMemset, "memset") KERNEL(cudaMemsetAsync, "memset")
API int cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  int device = find(p).device;
  memset(a, 0, sizeof *a);
  a->type = device == -2 ? cudaMemoryTypeUnregistered : device == -1 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = device >= 0 ? device : current;
  a->devicePointer = a->hostPointer = (void*)p;
  return 0;
}

// ---- the device
API int cudaDeviceGetAttribute(int* v, int a, int) {            // the driver's attributes have the same numbers
  const Card& c = gpu().card;
  static const std::map<int, int> values = {
    {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, c.shared_optin}, {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, c.shared_sm}, {cudaDevAttrMultiProcessorCount, c.sms},
    {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMaxThreadsPerMultiProcessor, c.threads_sm}, {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrClockRate, 1980000}, {cudaDevAttrMemoryClockRate, 2619000}, {cudaDevAttrL2CacheSize, 52428800},
    {cudaDevAttrGlobalMemoryBusWidth, 5120}, {cudaDevAttrComputeCapabilityMajor, c.major},
    {cudaDevAttrComputeCapabilityMinor, c.minor}, {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrMemoryPoolsSupported, 1}, {cudaDevAttrClusterLaunch, c.major >= 9}};
  *v = values.count(a) ? values.at(a) : 0;
  return 0;
}
API int cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
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
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = p->memoryPoolsSupported = 1; p->clusterLaunch = c.major >= 9;
  return 0;
}
FIRST(cudaGetDeviceCount, int, gpus()) FIRST(cudaGetDevice, int, current) FIRST(cudaDeviceCanAccessPeer, int, 0)
API int cudaSetDevice(int d) { if (d < 0 || d >= gpus()) return cudaErrorInvalidDevice; current = d; return 0; }
FIRST(cudaDriverGetVersion, int, 13000) FIRST(cudaRuntimeGetVersion, int, 13000)
API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return 0; }
API int cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", 1 + d); return 0; }
API const char* cudaGetErrorName(int) { return "nullGpuError"; }
API const char* cudaGetErrorString(int e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorNoKernelImageForDevice ?
    "no kernel image is available for execution on the device" : "an error of the GPU that is not there";
}
static int nothing() { return 0; }
API int cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, int* result) {
  if (!(*f = dlsym(RTLD_DEFAULT, name))) *f = (void*)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return 0;
}

// ---- streams and events. All that was queued counts as done; a wait is told by what it would have waited for.
HANDLE(cudaStreamCreate) HANDLE(cudaStreamCreateWithFlags) HANDLE(cudaStreamCreateWithPriority)
HANDLE(cudaEventCreate) HANDLE(cudaEventCreateWithFlags) SECOND(cudaStreamGetPriority, int, 0)
API int cudaStreamSynchronize() { count("wait for a stream"); return 0; }
API int cudaDeviceSynchronize() { count("wait for the device"); return 0; }
SECOND(cudaStreamIsCapturing, int, 0) SECOND(cudaStreamGetCaptureInfo, int, 0)         // none
API int cudaEventDestroy(void* e) { free(e); return 0; }
API int cudaEventRecord(long* e) { Lock lock(gpu().mutex); *e = gpu().launched; return 0; }
API int cudaEventRecordWithFlags(long* e) { return cudaEventRecord(e); }
API int cudaEventSynchronize(long* e) {         // with work queued behind it, the GPU goes on meanwhile
  count("wait for an event, " + std::to_string(gpu().launched - *e) + " launches behind it"); return 0;
}
FIRST(cudaEventElapsedTime, float, 1.0f)

// ---- kernels of the runtime API: torch's own
static thread_local int failed = 0;
static int launch() { return gpu().code ? queue("aten kernels") : failed = cudaErrorNoKernelImageForDevice; }
API int cudaPeekAtLastError() { return failed; }
API int cudaGetLastError() { return std::exchange(failed, 0); }
API void** __cudaRegisterFatBinary(void*) { static void* handle[64]; return handle; }
API void __cudaRegisterFatBinaryEnd() {} API void __cudaUnregisterFatBinary() {}
API void __cudaRegisterFunction() {} API void __cudaRegisterVar() {}
API char __cudaInitModule(void**) { return 1; }
API int __cudaGetKernel(const void** k, const void* host) { *k = host; return 0; }
API int __cudaPushCallConfiguration() { return 0; }
API int __cudaPopCallConfiguration() { return 0; }
API int __cudaLaunchKernel() { return launch(); }
API int cudaLaunchKernel() { return launch(); }
API int cudaLaunchKernelExC() { return launch(); }
API int cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  if (!gpu().code) return failed = cudaErrorNoKernelImageForDevice;
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = gpu().code;
  a->maxDynamicSharedSizeBytes = gpu().card.shared_optin;
  return 0;
}
FIRST(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int, 2)
API int cudaGetSymbolAddress(const void** p, const void* s) { *p = s; return 0; }

// ---- cuBLAS
HANDLE(cublasCreate_v2) HANDLE(cublasLtMatmulDescCreate) HANDLE(cublasLtMatmulPreferenceCreate) HANDLE(cublasLtMatrixLayoutCreate)
SECOND(cublasGetMathMode, int, 0) SECOND(cublasGetPointerMode_v2, int, 0)
API size_t cublasLtGetVersion() { return 130101; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* r, int* n) {
  memset(r, 0, 96); *n = 1; return 0;
}
KERNEL(cublasLtMatmul, "products") KERNEL(cublasGemmEx, "products") KERNEL(cublasGemmStridedBatchedEx, "products")
KERNEL(cublasSgemm_v2, "products") KERNEL(cublasSgemmStridedBatched, "products") KERNEL(cublasSgemmEx, "products")

// ---- the driver API: Triton's kernels
FIRST(cuDriverGetVersion, int, 13000) FIRST(cuDeviceGetCount, int, gpus())
SECOND(cuGetErrorString, const char*, "an error of the GPU that is not there")
API int cuDeviceGet(int* d, int ordinal) { *d = ordinal; return 0; }
API int cuDeviceGetAttribute(int* v, int a, int device) { return cudaDeviceGetAttribute(v, a, device); }
API int cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "%s", gpu().card.name); return 0; }
FIRST(cuCtxGetDevice, int, current)
static char a_context[64];
FIRST(cuCtxGetCurrent, void*, a_context) FIRST(cuDevicePrimaryCtxRetain, void*, a_context)
API int cuDevicePrimaryCtxGetState(int, unsigned* f, int* active) { *f = 0; *active = 1; return 0; }
HANDLE(cuModuleLoad) HANDLE(cuModuleLoadData) HANDLE(cuModuleLoadDataEx) HANDLE(cuModuleGetFunction)
API int cuFuncGetAttribute(int* v, int a, void*) {
  *v = a == 0 ? 1024 : a == 4 ? 32 : a == 5 || a == 6 ? 10 * gpu().card.major + gpu().card.minor : 0; return 0;
}
KERNEL(cuLaunchKernel, "triton kernels") KERNEL(cuLaunchCooperativeKernel, "triton kernels")
KERNEL(cuLaunchKernelEx, "triton kernels")
FIRST(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 2) FIRST(cuOccupancyMaxActiveClusters, int, 66)
API int cuPointerGetAttribute(void* v, int a, size_t p) {
  int device = find((void*)p).device;
  if (a == 2) *(int*)v = device < 0 ? 1 : 2;                    // the kind of memory: host or device
  else if (a == 9) *(int*)v = device < 0 ? current : device;    // whose
  else *(size_t*)v = p;
  return 0;
}

// ---- NCCL, for several GPUs with a process each. Each hears itself alone (but for what nullgpu.py sends by gloo): what
// counts is what it calls, in which order
struct ncclComm { int rank, ranks; };
struct UniqueId { char bytes[128]; };
static int collective(const char* name, const void* from, void* to, size_t n, int type, int slots = 1) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  State& g = gpu();
  Lock lock(g.mutex);
  size_t bytes = n * sizes[type];
  g.collectives.push_back({name, bytes});
  g.launched++;
  bool known = is_known(from, bytes);
  for (int i = 0; i < slots; i++) pass_on((char*)to + i * bytes, from, bytes, known);
  return 0;
}
FIRST(ncclGetVersion, int, 22907)
API int ncclGetUniqueId(UniqueId* id) { memset(id, 1, sizeof *id); return 0; }
API const char* ncclGetErrorString() { return "an error of the NCCL that is not there"; }
API int ncclCommInitRankConfig(ncclComm** c, int ranks, UniqueId, int rank) { *c = new ncclComm{rank, ranks}; return 0; }
API int ncclCommSplit(ncclComm* from, int, int, ncclComm** c) { *c = new ncclComm(*from); return 0; }
SECOND(ncclCommGetAsyncError, int, 0)
API int ncclAllReduce(const void* from, void* to, size_t n, int type) { return collective("all_reduce", from, to, n, type); }
API int ncclBcast(void* at, size_t n, int type) { return collective("broadcast", at, at, n, type); }
API int ncclAllGather(const void* from, void* to, size_t n, int type, ncclComm* c) {
  return collective("all_gather", from, to, n, type, c->ranks);
}
