// CUDA's header of this name comes with nvcc, not with the packages that torch installs; driver_types.h needs no more of it.
#pragma once
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __host__
#define __device__
#define __inline_hint__
#define __no_sc__
#define __forceinline__ inline
#define __specialization_static static
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define CUDA_DEPRECATED
