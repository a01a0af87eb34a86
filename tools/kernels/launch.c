/* What a prebuilt kernel's launch function calls to load and launch its kernels, by the CUDA driver alone.

It is linked into every entry of the kernels' wheel (tools/kernels_wheel.py), out of sight of other libraries. The functions' names and arguments are
those that the DSL's compiled code calls; what they do is the CUDA runtime's function of that name, of which the driver has one of its own with the
same numbers for attributes and the same layout of a launch. A status is a CUresult, 0 for success, and -1 where an error was raised already.

The driver is found by name when the first kernel is called: the process has loaded it by then, as there are tensors on a GPU. */

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define NO_DRIVER 3 /* CUDA_ERROR_NOT_INITIALIZED */
#define NO_CONTEXT 201 /* CUDA_ERROR_INVALID_CONTEXT */
#define NO_DEVICE 101 /* CUDA_ERROR_INVALID_DEVICE */
#define DEVICES 64 /* at most: a bit each */
#define HERE __attribute__((visibility("hidden")))

typedef void Raise(const char *kind, const char **parts, int32_t n);

static struct {
    int (*init)(unsigned);
    int (*current)(int *device);
    int (*retain)(void **context, int device);
    int (*make_current)(void *context);
    int (*device_attribute)(int *value, int attribute, int device);
    int (*load)(void **library, const void *code, void *, void *, unsigned, void *, void *, unsigned);
    int (*kernel)(void **kernel, void *library, const char *name);
    int (*kernel_attribute)(int *value, int attribute, void *kernel, int device);
    int (*set_kernel_attribute)(int attribute, int value, void *kernel, int device);
    int (*launch)(const void *config, void *kernel, void **arguments, void **extra);
    int (*error_name)(int status, const char **name);
} driver;

static const char *const NAMES[] = {
    "cuInit", "cuCtxGetDevice", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuLibraryLoadData",
    "cuLibraryGetKernel", "cuKernelGetAttribute", "cuKernelSetAttribute", "cuLaunchKernelEx", "cuGetErrorName",
};
_Static_assert(sizeof driver == sizeof NAMES, "a name for each function");

static struct {
    void *library; /* CUlibrary; an entry has one */
    int (*load)(void **, int); /* finds its kernels, and sets their limits on a device */
    uint64_t ready; /* devices whose limits are set */
} state;

static int busy;

static void lock(void) {
    while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE));
}
static void unlock(void) { __atomic_store_n(&busy, 0, __ATOMIC_RELEASE); }

static int find_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return NO_DRIVER;
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (!(((void **)&driver)[i] = dlsym(library, NAMES[i]))) return NO_DRIVER;
    return driver.init(0);
}

/* Set the limits of the kernels on a device, once. */
static int prepare(int device) {
    if (device >= DEVICES) return NO_DEVICE;
    if (__atomic_load_n(&state.ready, __ATOMIC_ACQUIRE) >> device & 1) return 0;
    int status = 0;
    lock();
    if (!(state.ready >> device & 1) && !(status = state.load(&state.library, device)))
        __atomic_fetch_or(&state.ready, (uint64_t)1 << device, __ATOMIC_RELEASE);
    unlock();
    return status;
}

static int switch_to(int device) {
    void *context;
    int status = driver.retain(&context, device);
    return status ? status : driver.make_current(context);
}

/* The current device. A thread that has chosen none is on the first one, as the CUDA runtime has it, and has no context yet. */
static int current(int *device) {
    int status = driver.current(device);
    if (status != NO_CONTEXT) return status;
    *device = 0;
    return switch_to(0);
}

/* At every call: load the kernels once, and set their limits once a device. `holder` is the launch function's own place for that. */
HERE int cuda_dialect_init_library_once(void **holder, int (*init)(void **), int (*load)(void **, int), void (*raise)(const char *, const char *)) {
    int status = 0, device = 0;
    if (!__atomic_load_n(holder, __ATOMIC_ACQUIRE)) { /* the driver is not known yet */
        lock();
        if (!*holder && !(status = find_driver()) && !(status = current(&device)) && !(status = init(&state.library))) {
            state.load = load;
            __atomic_store_n(holder, &state, __ATOMIC_RELEASE);
        }
        unlock();
    }
    if (!status) status = current(&device);
    if (!status) status = prepare(device);
    if (status) {
        char text[160];
        const char *name = NULL;
        if (driver.error_name) driver.error_name(status, &name);
        snprintf(text, sizeof text, "a prebuilt kernel cannot be loaded: CUDA error %d (%s)", status, name ? name : "no driver for CUDA 12 or later");
        raise("RuntimeError", text);
        return -1;
    }
    return 0;
}

/* Kernels stay loaded until the process ends. */
HERE void cuda_dialect_unload_library_once(void **holder) { (void)holder; }

HERE void CuteDSLRT_TVMFFISetRaisedCudaError(Raise *raise, int32_t status) {
    char text[160];
    const char *name = NULL;
    driver.error_name(status, &name);
    snprintf(text, sizeof text, "a kernel cannot be launched: CUDA error %d (%s)", (int)status, name ? name : "unknown");
    const char *parts[] = {text};
    raise("RuntimeError", parts, 1);
}

HERE int _cudaGetDevice(int *device) { return current(device); }
HERE int _cudaSetDevice(int device) {
    int status = switch_to(device);
    return status ? status : prepare(device);
}
HERE int _cudaDeviceGetAttribute(int *value, int attribute, int device) { return driver.device_attribute(value, attribute, device); }
HERE int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return driver.load(library, code, a, b, c, d, e, f);
}
HERE int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return driver.kernel(kernel, library, name); }
HERE int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    return driver.kernel_attribute(value, attribute, kernel, device);
}
HERE int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return driver.set_kernel_attribute(attribute, value, kernel, device);
}
HERE int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    int device, status = current(&device);
    return status ? status : driver.set_kernel_attribute(attribute, value, kernel, device);
}
HERE int _cudaLaunchKernelEx(const void *config, void *kernel, void **arguments) { return driver.launch(config, kernel, arguments, NULL); }
