"""Memory at an address as a DLPack capsule, which says itself on which device the memory is.

Source: the header dlpack.h, version 0.8: DLManagedTensor. Bound by ctypes, so that nothing but Python is needed.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object

CPU, CUDA = 1, 2
"""Of DLDeviceType."""

_UNSIGNED = 1  # of DLDataTypeCode
_NAME = b"dltensor"  # a consumer renames the capsule

_Deleter = ctypes.CFUNCTYPE(None, c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, c_void_p)

_api = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, _Destructor)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))
_incref = ctypes.PYFUNCTYPE(None, py_object)(("Py_IncRef", _api))
_decref = ctypes.PYFUNCTYPE(None, c_void_p)(("Py_DecRef", _api))


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor, with its DLTensor, DLDevice and DLDataType in line."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
        ("manager_ctx", c_void_p),
        ("deleter", _Deleter),
    )


class _Exported:
    """What a capsule points to, and what must live as long: it has one reference of its own until it is released."""

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.shape = (c_int64 * 1)()
        self.tensor = _ManagedTensor()


def byte_capsule(pointer: int, num_bytes: int, device: tuple[int, int], owner: object) -> object:
    """uint8 [num_bytes] at `pointer`, on `device` (type, number). `owner` lives as long as the capsule or its view."""
    exported = _Exported(owner)
    exported.shape[0] = num_bytes
    tensor = exported.tensor
    tensor.data = pointer
    tensor.device_type, tensor.device_id = device
    tensor.ndim = 1
    tensor.type_code, tensor.type_bits, tensor.type_lanes = _UNSIGNED, 8, 1
    tensor.shape = exported.shape
    tensor.manager_ctx = id(exported)
    tensor.deleter = _RELEASE
    capsule: object = _new_capsule(ctypes.addressof(tensor), _NAME, _RELEASE_UNUSED)
    _incref(exported)
    return capsule


def _release(address: int) -> None:
    """The consumer has no view any more."""
    _decref(_ManagedTensor.from_address(address).manager_ctx)


def _release_unused(capsule: int) -> None:
    """The capsule goes; nobody has made a view of it if it has its first name still."""
    if _is_valid(capsule, _NAME):
        _release(_pointer_of(capsule, _NAME))


_RELEASE, _RELEASE_UNUSED = _Deleter(_release), _Destructor(_release_unused)
for _thunk in (_RELEASE, _RELEASE_UNUSED):
    _incref(_thunk)  # never freed: a view may be released after this module has gone
