/* Stands for the CUDA runtime under the launch functions that the DSL compiles: kernels are handed to `launch` instead of to a GPU. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct Launch Launch; /* cudaLaunchConfig_t */

int (*launch)(const char *kernel, const Launch *, void **arguments);
char message[4096]; /* of the last error */

int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int)) {
    if (*library) return 0;
    *library = message;
    return init(library) || load(library, 0);
}
void cuda_dialect_unload_library_once(void) {}
int _cudaLibraryLoadData(void) { return 0; }
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = strdup(name);
    return 0;
}
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(void) { return 0; }
int _cudaDeviceGetAttribute(int *value) {
    *value = 227 << 10; /* bytes of shared memory that a block may have */
    return 0;
}
int _cuKernelGetAttribute(int *value) { return *value = 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cudaLaunchKernelEx(const Launch *config, const char *kernel, void **arguments) { return launch(kernel, config, arguments); }

void *TVMFFIEnvGetStream(void) { return NULL; }
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) { snprintf(message, sizeof message, "%s: %s", kind, text); }
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t n) {
    size_t used = snprintf(message, sizeof message, "%s: ", kind);
    for (int i = 0; i < n && used < sizeof message; i++) used += snprintf(message + used, sizeof message - used, "%s", parts[i]);
}
int CuteDSLRT_TVMFFISetRaisedCudaError(int code) {
    snprintf(message, sizeof message, "a launch failed with %d", code);
    return -1;
}
