// libacl_op_compiler: the compiler of single operators. The wheel sets its options at start; nothing is compiled here.
#include <acl/acl_op_compiler.h>
#include <acl/error_codes/rt_error_codes.h>

#include <cstring>

#include "submit.h"

namespace {

int refuse(const char* operation) {
    standin_trace(operation);
    return standin_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, operation);
}

}  // namespace

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

size_t aclGetCompileoptSize(aclCompileOpt) { return 1; }

aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
    if (value && length) *value = '\0';
    return ACL_SUCCESS;
}

aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }

// An operator comes here when it has no aclnn kernel, or when its tensors have a device's own format.
aclError aclopCompileAndExecute(const char* operation, int, const aclTensorDesc* const[], const aclDataBuffer* const[],
                                int, const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream) {
    return refuse(operation);
}

aclError aclopCompileAndExecuteV2(const char* operation, int, aclTensorDesc* [], aclDataBuffer* [], int,
                                  aclTensorDesc* [], aclDataBuffer* [], aclopAttr*, aclopEngineType, aclopCompileType,
                                  const char*, aclrtStream) {
    return refuse(operation);
}

aclError aclGenGraphAndDumpForOp(const char* operation, int, const aclTensorDesc* const[], const aclDataBuffer* const[],
                                 int, const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*,
                                 aclopEngineType, const char*, const aclGraphDumpOption*) {
    return refuse(operation);
}

aclGraphDumpOption* aclCreateGraphDumpOpt() { return nullptr; }

aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption*) { return ACL_SUCCESS; }
