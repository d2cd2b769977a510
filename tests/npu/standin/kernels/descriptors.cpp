// aclCreate*, aclDestroy* and aclGetViewShape: the arguments of operators are made, read and thrown away here.
#include "descriptors.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "../submit.h"

namespace {

constexpr int kInvalidParameter = 161002;  // ACLNN_ERR_PARAM_INVALID

// Calls make() and answers what it made; where it throws, the wheel gets null and the text.
template <class Make>
auto made(Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception& error) {
        standin_fail(kInvalidParameter, error.what());
        return nullptr;
    }
}

template <class Element>
at::Scalar number(const void* value) {
    Element element;
    std::memcpy(&element, value, sizeof(element));
    return at::Scalar(element);
}

at::Scalar number(const void* value, at::ScalarType type) {
    switch (type) {
        case at::kBool: return number<bool>(value);
        case at::kByte: return number<uint8_t>(value);
        case at::kChar: return number<int8_t>(value);
        case at::kShort: return number<int16_t>(value);
        case at::kInt: return number<int32_t>(value);
        case at::kLong: return number<int64_t>(value);
        case at::kHalf: return number<at::Half>(value);
        case at::kBFloat16: return number<at::BFloat16>(value);
        case at::kFloat: return number<float>(value);
        case at::kDouble: return number<double>(value);
        case at::kComplexFloat: return number<c10::complex<float>>(value);
        case at::kComplexDouble: return number<c10::complex<double>>(value);
        default: TORCH_CHECK(false, "a scalar of type ", type, " is not known to the stand-in");
    }
}

template <class Element>
Array<Element>* array(const Element* values, uint64_t count) {
    return new Array<Element>{std::vector<Element>(values, values + count)};
}

}  // namespace

namespace standin {

at::ScalarType scalar_type(int code) {
    static const std::map<int, at::ScalarType> types = {
        {0, at::kFloat},   {1, at::kHalf},   {2, at::kChar},    {3, at::kInt},         {4, at::kByte},
        {6, at::kShort},   {7, at::kUInt16}, {8, at::kUInt32},  {9, at::kLong},        {10, at::kUInt64},
        {11, at::kDouble}, {12, at::kBool},  {16, at::kComplexFloat}, {17, at::kComplexDouble}, {27, at::kBFloat16},
    };
    const auto found = types.find(code);
    TORCH_CHECK(found != types.end(), "data type ", code, " of CANN is not known to the stand-in");
    return found->second;
}

}  // namespace standin

// `data` is where the storage begins; `offset` and strides count elements, and strides may be 0 (an expanded tensor).
STANDIN_EXPORT aclTensor* aclCreateTensor(
    const int64_t* sizes, uint64_t dims, int type, const int64_t* strides, int64_t offset, int /*format*/,
    const int64_t* /*storage_sizes*/, uint64_t /*storage_dims*/, void* data
) {
    return made([&] {
        const auto dtype = standin::scalar_type(type);
        char* begin = static_cast<char*>(data) + offset * static_cast<int64_t>(at::elementSize(dtype));
        const auto view = at::from_blob(begin, {sizes, dims}, {strides, dims}, at::TensorOptions().dtype(dtype));
        return new aclTensor{view, {}};
    });
}

STANDIN_EXPORT int aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return 0;
}

// The list owns its tensors, as in CANN; null stands for a tensor that is absent.
STANDIN_EXPORT aclTensorList* aclCreateTensorList(aclTensor* const* tensors, uint64_t count) {
    return new aclTensorList{{tensors, tensors + count}};
}

STANDIN_EXPORT int aclDestroyTensorList(const aclTensorList* list) {
    std::for_each(list->tensors.begin(), list->tensors.end(), [](const aclTensor* tensor) { delete tensor; });
    delete list;
    return 0;
}

STANDIN_EXPORT aclScalar* aclCreateScalar(const void* value, int type) {
    return made([&] { return new aclScalar{number(value, standin::scalar_type(type))}; });
}

STANDIN_EXPORT int aclDestroyScalar(const aclScalar* scalar) {
    delete scalar;
    return 0;
}

// The list owns its scalars.
STANDIN_EXPORT aclScalarList* aclCreateScalarList(aclScalar* const* scalars, uint64_t count) {
    auto* list = new aclScalarList;
    for (uint64_t index = 0; index < count; ++index) {
        list->values.push_back(scalars[index]->value);
        delete scalars[index];
    }
    return list;
}

STANDIN_EXPORT int aclDestroyScalarList(const aclScalarList* list) {
    delete list;
    return 0;
}

STANDIN_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) { return array(values, count); }
STANDIN_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) { return array(values, count); }
STANDIN_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) { return array(values, count); }

STANDIN_EXPORT int aclDestroyIntArray(const aclIntArray* array) {
    delete array;
    return 0;
}

STANDIN_EXPORT int aclDestroyFloatArray(const aclFloatArray* array) {
    delete array;
    return 0;
}

STANDIN_EXPORT int aclDestroyBoolArray(const aclBoolArray* array) {
    delete array;
    return 0;
}

// The shape of what an operator wrote, if that depends on data, else the tensor's own; the caller frees it.
STANDIN_EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
    const auto shape = tensor->written.empty() ? tensor->view.sizes().vec() : tensor->written;
    *dims = shape.size();
    *sizes = new int64_t[shape.size()];
    std::copy(shape.begin(), shape.end(), *sizes);
    return 0;
}

STANDIN_EXPORT int aclnnInit(const char* /*configuration*/) { return 0; }
STANDIN_EXPORT int aclnnFinalize() { return 0; }
