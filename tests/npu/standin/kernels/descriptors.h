// What the aclnn interface hands to an operator: tensors, lists and numbers made by aclCreate* calls.
//
// A tensor is a view of device memory, which is host memory here, so ATen's CPU kernels can work on it as it is.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

struct aclTensor {
    at::Tensor view;
    std::vector<int64_t> written;  // the shape that an operator with a data-dependent result gave it
};

struct aclTensorList {
    std::vector<aclTensor*> tensors;
};

struct aclScalar {
    at::Scalar value;
};

struct aclScalarList {
    std::vector<at::Scalar> values;
};

template <class Element>
struct Array {
    std::vector<Element> values;
};

using aclIntArray = Array<int64_t>;
using aclFloatArray = Array<float>;
using aclBoolArray = Array<bool>;

namespace standin {

// ATen's type for a CANN data type code (aclDataType); throws c10::Error for one that has none.
at::ScalarType scalar_type(int code);

}  // namespace standin
