// Tensor maps: copies of rectangles of a matrix to shared memory that arrive at a barrier (PTX ISA, "Tensor data";
// sm_90 and later). What lies outside the matrix arrives as zeros.
#pragma once

#include <cuda.h>

#include <iterator>

#include "common.cuh"

namespace nibblelm::cuda {

constexpr int kMapColumns{64};                // of a rectangle
constexpr int kMapRowBytes{2 * kMapColumns};  // of a row of it in shared memory

// Of an array at `array` whose last dimension comes first in `sizes` and `box`: `strides`, in bytes, of the others.
template <size_t Rank, class What>
CUtensorMap tensor_map(CUtensorMapDataType type, const void* array, const cuuint64_t (&sizes)[Rank],
                       const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&box)[Rank], CUtensorMapSwizzle swizzle,
                       What what) {
  static const auto encode = [&] {
    void* function{nullptr};
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          what());
#else
    check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found), what());
#endif
    if (found != cudaDriverEntryPointSuccess)
      throw std::runtime_error(what() + ": the driver has no tensor maps; update it");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map{};
  constexpr cuuint32_t kSteps[]{1, 1, 1};
  static_assert(Rank <= std::size(kSteps));
  const CUresult status =
      encode(&map, type, Rank, const_cast<void*>(array), sizes, strides, box, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error(what() + ": no tensor map, error " + std::to_string(status));
  return map;
}

// The matrix (rows, columns) at `matrix`, rows `stride` elements of `bytes` bytes apart, in rectangles of `box_columns`
// columns and `box_rows` rows, at most 256 each. Address, stride and a rectangle's row are multiples of 16 bytes.
template <class What>
CUtensorMap tensor_map(CUtensorMapDataType type, int bytes, const void* matrix, int64_t rows, int64_t columns,
                       int64_t stride, int box_columns, int box_rows, CUtensorMapSwizzle swizzle, What what) {
  const cuuint64_t sizes[]{static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[]{static_cast<cuuint64_t>(stride) * bytes};
  const cuuint32_t box[]{static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  return tensor_map(type, matrix, sizes, strides, box, swizzle, what);
}

// Of bf16, in rectangles of kMapColumns columns: 16-byte chunk c of a row of 128 bytes goes to c ^ row % 8.
template <class What>
CUtensorMap tensor_map(const void* matrix, int64_t rows, int64_t columns, int64_t stride, int box_rows, What what) {
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix, rows, columns, stride, kMapColumns, box_rows,
                    CU_TENSOR_MAP_SWIZZLE_128B, what);
}

// The same of parts of a row, of `width` columns each, which rectangles do not go beyond.
template <class What>
CUtensorMap tensor_map_of(const void* matrix, int64_t rows, int parts, int width, int64_t stride, int box_rows,
                          What what) {
  const cuuint64_t sizes[]{static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(parts),
                           static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[]{static_cast<cuuint64_t>(width) * 2, static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[]{kMapColumns, 1, static_cast<cuuint32_t>(box_rows)};
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, matrix, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, what);
}

// Of words of 8 bytes, with one row behind the other, as they are.
template <class What>
CUtensorMap word_map(const void* matrix, int64_t rows, int64_t columns, int box_columns, int box_rows, What what) {
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT64, 8, matrix, rows, columns, columns, box_columns, box_rows,
                    CU_TENSOR_MAP_SWIZZLE_NONE, what);
}

// By one thread: the rectangle whose first element is (row, column), to a multiple of 128 bytes, of 1,024 where chunks
// are swizzled.
__device__ __forceinline__ void copy_rectangle(uint32_t shared, const CUtensorMap& map, int row, int column,
                                               uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
#endif
}

// The same of a map of parts: from column `column` of part `part` on.
__device__ __forceinline__ void copy_rectangle_of(uint32_t shared, const CUtensorMap& map, int row, int part,
                                                  int column, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(part), "r"(row)
      : "memory");
#endif
}

// The same as copy_rectangle with a hint for L2 (common.cuh).
__device__ __forceinline__ void copy_rectangle(uint32_t shared, const CUtensorMap& map, int row, int column,
                                               uint32_t barrier, uint64_t hint) {
  if constexpr (kArchitecture != 90) return copy_rectangle(shared, map, row, column, barrier);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(hint)
      : "memory");
#endif
}

// Orders what this thread stored to shared memory before copies and products that come after it.
__device__ __forceinline__ void fence_async() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace nibblelm::cuda
