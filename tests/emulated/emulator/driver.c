/* Stands for CUDA's driver under prebuilt kernels: they are handed to `launch` instead of to a GPU. */

#include <stdint.h>
#include <string.h>

typedef struct Launch Launch; /* CUlaunchConfig */

int (*launch)(const char *kernel, const Launch *, void **arguments);
int version = 13000, failure, contexts, loads; /* failure: of what loads kernels; contexts: that threads have; loads: so far */
int limits[16]; /* by CUfunction_attribute, as they were set last */

int cuDriverGetVersion(int *value) {
    *value = version;
    return 0;
}
int cuInit(unsigned flags) { return (int)flags; }
int cuCtxGetDevice(int *device) {
    *device = 0;
    return contexts ? 0 : 201;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = limits;
    return device;
}
int cuCtxSetCurrent(void *context) { return !(contexts = context == limits); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 97 ? 227 << 10 : -1; /* bytes of shared memory that a block may have */
    return device;
}
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    loads++;
    *library = (void *)code;
    return failure ? failure : *(const uint32_t *)code == 0xBA55ED50 ? 0 : 200; /* it begins as what nvcc calls a fat binary */
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = strdup(name);
    return library ? 0 : 400;
}
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    *value = 0;
    return attribute == 1 && kernel ? device : 1;
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    limits[attribute] = value;
    return kernel ? device : 400;
}
int cuLaunchKernelEx(const Launch *config, void *kernel, void **arguments, void **extra) { return extra ? 1 : launch(kernel, config, arguments); }
int cuGetErrorName(int status, const char **name) {
    *name = status == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "another";
    return 0;
}
